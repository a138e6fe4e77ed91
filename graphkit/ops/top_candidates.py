"""The most probable tokens of rows of logits, with their probabilities.

Suffixes: N rows to return, M rows of logits, K topk, V vocabulary.
"""

from __future__ import annotations

from typing import Annotated, Any

import torch

from graphkit.errors import InputError
from graphkit.ops.argument_rules import describe
from graphkit.ops.registration import register_op


def empty_candidates(given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate the results of ``top_candidates``."""
    logits = given.logits
    shape = len(logits) if given.index is None else len(given.index), given.topk
    return logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int64)


def _check_logits(given: Any) -> None:
    """Refuse logits that are not floats or fewer than K, and a wrong number of temperatures."""
    logits, topk, temperature = given.logits, given.topk, given.temperature
    if not logits.is_floating_point() or topk > logits.shape[1]:
        raise InputError(
            f"top_candidates: logits is {describe(logits)}, expected floats [rows, V] with V >= "
            f"topk = {topk}.",
            field="logits",
        )
    rows = len(logits) if given.index is None else len(given.index)
    if temperature is not None and len(temperature) != rows:
        raise InputError(
            f"top_candidates: temperature is {describe(temperature)}, expected [{rows}] float32.",
            field="temperature",
        )


@register_op(fake=empty_candidates, check=_check_logits)
def top_candidates(
    logits: Annotated[torch.Tensor, "[M, V >= 1]"],
    topk: Annotated[int, "K >= 1"],
    temperature: Annotated[torch.Tensor | None, "[N] float32"] = None,
    index: Annotated[torch.Tensor | None, "[N] int64"] = None,
    token_map: Annotated[torch.Tensor | None, "[V] int64"] = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the probabilities and ids of the K most probable tokens of each row.

    One launch on the current stream, none without rows. Never synchronises; may be captured.

    Args:
        logits: The rows.
        topk: Tokens per row (K).
        temperature: Divides the logits of each returned row; 1 by default.
        index: Rows to return; by default all of them in order. An index outside ``logits`` is an
            error on the CPU; on CUDA it counts as the nearest row.
        token_map: Token id of each column of ``logits``; by default its number.

    Returns:
        Probabilities in descending order and the token ids. Of equal probabilities the first column
        is first on CUDA and for K = 1; otherwise their order is that of ``Tensor.topk``.

    Shapes:
        logits: [M, V] of any float dtype, V >= K. temperature: [N] float32. index: [N] int64.
        token_map: [V] int64. Returns [N, K] float32, [N, K] int64.

    Raises:
        InputError: A tensor has the wrong shape, dtype or device, or V is less than K.
    """
    rows = (logits if index is None else logits.index_select(0, index)).float()
    scores = rows if temperature is None else rows / temperature[:, None]
    if topk == 1:
        best, tokens = scores.max(-1, keepdim=True)
        probs = (best - scores.logsumexp(-1, keepdim=True)).exp()
    else:
        probs, tokens = scores.softmax(-1).topk(topk)
    return probs, tokens if token_map is None else token_map[tokens]
