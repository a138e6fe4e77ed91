"""Comparison of the logits of a target's forwards with the model that they wrap."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from graphkit.errors import TargetError, short_repr
from graphkit.graphs import StateSnapshot
from graphkit.graphs.compiles import compile_ahead
from graphkit.models.wrapper.batch_comparison import BatchComparison
from graphkit.models.wrapper.model_logits import ModelLogits, rows_at_once
from graphkit.models.wrapper.requests import tree_requests, window_settings
from graphkit.models.wrapper.text_batches import (
    SERVED_FIELDS,
    TextBatch,
    TextBatches,
    TreeRequest,
)
from graphkit.records import WrapperRecord
from graphkit.runners import Runner
from graphkit.runners.comparison.differences import Rounding
from graphkit.runners.comparison.step_comparison import restorable_state
from graphkit.runners.targets import CaptureTarget
from graphkit.spec import ForwardMode

WRAPPED_MODES = (ForwardMode.TARGET_VERIFY, ForwardMode.DECODE)
"""Modes that compute the logits of the model."""
_ORDER_OF_SUMS = {torch.float32: 4}
"""Factor on the tolerance by dtype, otherwise 1. Attention over pages adds in another order than
the model: in float32, correct small models differ by up to 14 ulp."""
_ORDER_OF_RECURRENCE = {torch.float32: 64}
"""The same with recurrent layers, otherwise 4. A model computes the states of a prompt in chunks, a
verify step node by node. Where more is needed, the model's own decoding is measured."""


def compare_wrapper(
    target: CaptureTarget,
    model: Callable[[torch.Tensor], Any],
    *,
    prompt_length: int | None = None,
    device: str = "auto",
    tolerance: float = 1.0,
) -> WrapperRecord:
    """Compare the forwards of TARGET_VERIFY and DECODE with the model that they wrap.

    The forwards run eagerly, as for batches without a graph: on the rows of a prompt, on a tree of
    drafts behind it (a chain without ``custom_mask``), on the prompt of a second request, and on
    the drafts of both requests side by side. Each row must have the logits that the model computes
    on the prompt and the path to that row, up to rounding. Modules that choose, such as a router of
    experts, take the choices of the model. The comparison ends with the first batch that differs.
    Restores declared state and random numbers.

    Args:
        target: What to compare.
        model: As for ``CaptureTarget``.
        prompt_length: Tokens of the longer prompt; ``None`` exceeds the windows and chunks that the
            config of the model names and the context of the target exceeds.
        device: ``auto``, ``cpu`` or ``cuda``; that of the model.
        tolerance: Multiple of the usual rounding that is allowed, see ``Rounding``.

    Raises:
        ConfigError: ``prompt_length`` does not fit the context, or the tolerance is invalid.
        TargetError: The KV slots of the target are unknown, or the model returns no logits of every
            token, or its logits of a prompt depend on later tokens.
    """
    modes = [mode for mode in WRAPPED_MODES if mode in target.forwards]
    skipped = skip_reason(target, modes)
    if skipped:
        return WrapperRecord(skipped=skipped)
    with ExitStack() as stack:
        runners = [stack.enter_context(target.runner(mode, device=device)) for mode in modes]
        unserved = unserved_field(runners)
        if unserved:
            return WrapperRecord(skipped=unserved)
        windows = window_settings(model, target.weights, *target.forwards.values())
        requests = tree_requests(target, runners[0], windows, prompt_length)
        logits = ModelLogits(model, runners[0].device, target.sizes.vocab_size)
        dtype = target.sizes.dtype
        if target.recurrent_state is None:
            factor = _ORDER_OF_SUMS.get(dtype, 1)
        else:
            factor = _ORDER_OF_RECURRENCE.get(dtype, 4)
        rounding = Rounding(dtype, tolerance * factor)
        comparison = BatchComparison(target, logits, rounding, windows)
        comparison.measure_rounding(requests[0])
        length = len(requests[0].prompt)
        state = {name: tensor for r in runners for name, tensor in restorable_state(r).items()}
        stack.enter_context(StateSnapshot(state, runners[0].device))
        batches = partial(_batches, runners, requests, rows_at_once(target.sizes))
        compile_ahead(
            runners[0].backend,
            [lambda: [comparison.run(runner, batch, {}) for runner, batch in batches()]],
        )
        for runner, batch in batches():
            if not comparison.agrees(runner, batch):
                break
    return replace(
        comparison.record,
        prompt_length=length,
        not_reached=tuple(f"{name} {size}" for name, size in windows.items() if size >= length),
    )


def _batches(
    runners: Sequence[Runner[Any, Any]], requests: Sequence[TreeRequest], rows: int
) -> Iterator[tuple[Runner[Any, Any], TextBatch]]:
    """Yield all batches of the first runner, then a step of every other runner."""
    first, *others = runners
    for batch in TextBatches(first, requests, rows).all():
        yield first, batch
    for runner in others:
        yield runner, TextBatches(runner, requests, rows).step(range(len(requests)))


def skip_reason(target: CaptureTarget, modes: Sequence[ForwardMode]) -> str:
    """Return why the target cannot be compared, as a phrase; empty if it can."""
    if not modes:
        return "the target has no forward for TARGET_VERIFY or DECODE"
    if target.group is not None:
        return "the target runs on several ranks"
    if target.spec.linear_attention and target.recurrent_state is None:
        return "the target has recurrent layers, but declares no recurrent_state"
    return ""


def unserved_field(runners: Sequence[Runner[Any, Any]]) -> str:
    """Return which field of the inputs has no values here, as a phrase; empty if none."""
    for runner in runners:
        for layout in runner.buffers.layouts:
            if layout.name not in SERVED_FIELDS:
                return f"there are no values for the field {layout.name!r} of {runner.mode.name}"
    return ""


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
