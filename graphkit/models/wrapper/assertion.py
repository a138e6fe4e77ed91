"""Assertion that a target computes what its model computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from graphkit.errors import TargetError, short_repr
from graphkit.models.wrapper.comparison import compare_wrapper
from graphkit.records import WrapperRecord
from graphkit.runners.targets import CaptureTarget


def check_wrapper(
    target: CaptureTarget,
    model: Callable[[torch.Tensor], Any] | None = None,
    *,
    prompt_length: int | None = None,
    device: str = "auto",
    tolerance: float = 1.0,
) -> WrapperRecord:
    """Fail unless the forwards of a target compute the logits of the model that they wrap.

    Runs TARGET_VERIFY, and DECODE if the target has it, without graphs: the rows of a prompt, a
    tree of drafts behind it (a chain without ``custom_mask``), and a second request of another
    length beside the first. Every row must have the logits that the model computes on the prompt
    and the path to that row. They may differ by rounding: by 4 times what the model's own logits
    differ by when tokens follow the prompt, at least 8 ulp and at most 256 of float32, or 16 of
    bfloat16. In float32 four times that is allowed, and 64 times with recurrent layers. Where a
    model needs more, 4 times what its logits differ by from those of its own decoding, token by
    token over its cache, are allowed, too. Compare in float32 where you can: a small mistake may
    hide in the rounding of bfloat16.

    The target's KV pools, random numbers and other declared state are restored.

    Args:
        target: The wrapper. It needs a forward for TARGET_VERIFY or DECODE, and the KV slots of
            its sample batches' rows: an ``attention`` with a ``req_to_token_pool``, or
            ``kv_slots``.
        model: A causal language model of transformers, or any function from token ids, int64
            [1, N] on the device, to logits [1, N, V] or an object with ``logits``. It must not run
            through the wrapper. ``None`` selects ``target.model``. If it is a module whose
            submodules have the names of those of ``target.weights``, or are the same, a failure
            names the first module that differs.
        prompt_length: Tokens of the longer prompt; ``None`` selects 64, or 8 more than the largest
            ``sliding_window`` or ``attention_chunk_size`` of the model's config that the context of
            the target exceeds.
        device: ``auto``, ``cpu`` or ``cuda``; that of the model.
        tolerance: Multiple of the rounding that is allowed.

    Returns:
        What was compared. ``not_reached`` names the windows that no prompt exceeds.

    Raises:
        AssertionError: A row differs. The text has the row, its request and position, the largest
            difference, the first module that differs, and what to look at.
        ConfigError: ``prompt_length`` does not fit the context, or the tolerance is invalid.
        TargetError: There is no model, the target cannot be compared, or the model returns no
            logits of every token, or such that depend on later tokens.
    """
    compared_with = target.model if model is None else model
    if not callable(compared_with):
        raise TargetError(
            f"target {target.name!r} has nothing to be compared with: model is "
            f"{short_repr(compared_with)}. "
            "Pass a function from token ids [1, N] to logits [1, N, V], or a model of transformers."
        )
    record = compare_wrapper(
        target, compared_with, prompt_length=prompt_length, device=device, tolerance=tolerance
    )
    if record.skipped:
        raise TargetError(
            f"target {target.name!r} cannot be compared with its model: {record.skipped}."
        )
    difference = record.difference
    if difference is not None:
        line = f"\n  called at {difference.source}" if difference.source else ""
        raise AssertionError(f"{difference.mode}: {difference.text}{line}\n  {difference.advice}")
    return record
