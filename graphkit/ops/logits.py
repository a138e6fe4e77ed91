"""Tokens from rows of logits: the most probable one, the K most probable ones, and bitmasks.

Dimensions: N rows to return, M rows of logits, K topk, V vocabulary.
"""

from __future__ import annotations

from typing import Annotated, Any

import torch

from graphkit.config import WORD_BITS
from graphkit.errors import InputError
from graphkit.ops.argument_rules import describe
from graphkit.ops.registration import register_op


@register_op(mutates_args=("logits",))
def apply_token_bitmask(
    logits: Annotated[torch.Tensor, "[N, V >= 1] floating-point"],
    bitmask: Annotated[torch.Tensor, "[N, (V + 31) // 32] int32"],
) -> None:
    """Set the logits of tokens that may not follow to -inf, in place.

    Token t may follow if bit ``t % 32`` of word ``t // 32`` of its row is set. This is the layout
    of xgrammar's ``allocate_token_bitmask``. Bits behind the vocabulary do not count. Logits of
    other tokens do not change, NaN included.

    A row without an allowed token becomes -inf throughout: ``argmax_rows`` then returns token 0,
    and ``target_probs`` NaN. The caller must not pass one.

    Args:
        logits: The logits.
        bitmask: Allowed tokens of each row; -1 in every word allows all.
    """
    bits = torch.arange(WORD_BITS, dtype=torch.int32, device=logits.device)
    allowed = ((bitmask[:, :, None] >> bits) & 1).flatten(1)[:, : logits.shape[1]]
    logits.masked_fill_(allowed == 0, -torch.inf)


def _check_source(op: str, args: Any) -> None:
    """Refuse an index of rows of logits that has none."""
    if args.index is not None and len(args.index) and not len(args.logits):
        raise InputError(
            f"{op}: logits is {describe(args.logits)}, expected at least one row for the "
            f"{len(args.index)} rows of index.",
            field="logits",
        )


def _check_rows(args: Any) -> None:
    """Refuse logits without a row for each token."""
    _check_source("argmax_rows", args)
    logits, tokens = args.logits, args.tokens
    if args.index is None and len(logits) != len(tokens):
        raise InputError(
            f"argmax_rows: logits is {describe(logits)}, expected [{len(tokens)}, V], a row per "
            "token. Pass index to select rows.",
            field="logits",
        )


def with_processed(
    logits: torch.Tensor, processed: torch.Tensor | None, is_processed: torch.Tensor | None
) -> torch.Tensor:
    """Return logits in which processed rows replace some; itself if there are none."""
    if processed is None or is_processed is None or not is_processed.any():
        return logits
    return torch.where(is_processed[:, None], processed, logits.to(processed.dtype))


@register_op(mutates_args=("tokens",), check=_check_rows)
def argmax_rows(
    tokens: Annotated[torch.Tensor, "[N] int64, contiguous"],
    logits: Annotated[torch.Tensor, "[M, V >= 1] floating-point"],
    index: Annotated[torch.Tensor | None, "[N] int64"] = None,
    token_map: Annotated[torch.Tensor | None, "[V] int64"] = None,
    processed: Annotated[torch.Tensor | None, "[M, V] float32 or float64"] = None,
    is_processed: Annotated[torch.Tensor | None, "[M] bool"] = None,
) -> None:
    """Write the token of the largest value of each row, as ``Tensor.argmax`` does.

    Of equal values the first counts, and NaN is larger than any number.

    Args:
        tokens: Receives the tokens.
        logits: The rows. M is N without ``index``.
        index: Row of each token; by default token n comes from row n. An index outside ``logits``
            is an error on the CPU; on CUDA it counts as the nearest row.
        token_map: Token of each column of ``logits``; by default its number.
        processed: Replaces some rows of ``logits``, see ``process_logits``.
        is_processed: Which rows.
    """
    logits = with_processed(logits, processed, is_processed)
    rows = logits if index is None else logits.index_select(0, index)
    best = rows.argmax(-1)
    tokens.copy_(best if token_map is None else token_map[best])


def empty_candidates(args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate the results of ``top_candidates``."""
    logits = args.logits
    shape = len(logits) if args.index is None else len(args.index), args.topk
    return logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int64)


def _check_logits(args: Any) -> None:
    """Refuse logits without rows, and a wrong number of temperatures."""
    _check_source("top_candidates", args)
    logits, temperature = args.logits, args.temperature
    rows = len(logits) if args.index is None else len(args.index)
    if temperature is not None and len(temperature) != rows:
        raise InputError(
            f"top_candidates: temperature is {describe(temperature)}, expected [{rows}] float32.",
            field="temperature",
        )


@register_op(fake=empty_candidates, check=_check_logits)
def top_candidates(
    logits: Annotated[torch.Tensor, "[M, V >= 1] floating-point"],
    topk: Annotated[int, "1 <= K <= V"],
    temperature: Annotated[torch.Tensor | None, "[N] float32"] = None,
    index: Annotated[torch.Tensor | None, "[N] int64"] = None,
    token_map: Annotated[torch.Tensor | None, "[V] int64"] = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the probabilities and ids of the K most probable tokens of each row.

    On CUDA a row has the same results in any batch, and NaN counts as -inf in the choice of tokens.

    Args:
        logits: The rows.
        topk: Tokens per row (K).
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
