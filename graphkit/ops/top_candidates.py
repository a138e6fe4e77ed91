"""The most probable tokens of rows of logits, with their probabilities.

Dimensions: N rows to return, M rows of logits, K topk, V vocabulary.
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
    """Refuse fewer logits than K, and a wrong number of temperatures."""
    logits, topk, temperature = given.logits, given.topk, given.temperature
    if topk > logits.shape[1]:
        raise InputError(
            f"top_candidates: logits is {describe(logits)}, expected [rows, V] with V >= topk = "
            f"{topk}.",
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
    logits: Annotated[torch.Tensor, "[M, V >= 1] floating-point"],
    topk: Annotated[int, "K >= 1"],
    temperature: Annotated[torch.Tensor | None, "[N] float32"] = None,
    index: Annotated[torch.Tensor | None, "[N] int64"] = None,
    token_map: Annotated[torch.Tensor | None, "[V] int64"] = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the probabilities and ids of the K most probable tokens of each row.

    Args:
        logits: The rows.
        topk: Tokens per row (K). At most V.
        temperature: Divides the logits of each returned row; 1 by default.
        index: Rows to return; by default all of them in order. An index outside ``logits`` is an
            error on the CPU; on CUDA it counts as the nearest row.
        token_map: Token id of each column of ``logits``; by default its number.

    Returns:
        Probabilities in descending order, [N, K] float32, and the token ids, [N, K] int64. Of equal
        probabilities the first column is first on CUDA and for K = 1; otherwise their order is that
        of ``Tensor.topk``.
    """
    rows = (logits if index is None else logits.index_select(0, index)).float()
    scores = rows if temperature is None else rows / temperature[:, None]
    if topk == 1:
        best, tokens = scores.max(-1, keepdim=True)
        probs = (best - scores.logsumexp(-1, keepdim=True)).exp()
    else:
        probs, tokens = scores.softmax(-1).topk(topk)
    return probs, tokens if token_map is None else token_map[tokens]
