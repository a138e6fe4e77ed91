"""Drafts from earlier matches of the last tokens in the text of the same request.

Dimensions: B requests, W nodes of each, K matches, R request rows, C columns of the text.
"""

from __future__ import annotations

from typing import Annotated

import torch

from graphkit.ops.packed import write
from graphkit.ops.registration import register_op

MAX_MATCH = 4
"""Most tokens that a lookup compares. Longer matches rarely change the choice."""


@register_op(mutates_args=("text",))
def ngram_drafts(
    text: Annotated[torch.Tensor, "[R, C] int64, contiguous"],
    req_pool_indices: Annotated[torch.Tensor, "[B] int64"],
    seq_lens: Annotated[torch.Tensor, "[B] int32"],
    bonus_tokens: Annotated[torch.Tensor, "[B] int64"],
    topk: Annotated[int, "1 <= K <= C"],
    width: Annotated[int, "W >= 1"],
) -> Annotated[torch.Tensor, "[B, W] int64"]:
    """Add the bonus tokens to the texts, and draft what followed earlier matches of their ends.

    The K best matches are the longest ones, up to 4 tokens; of equal lengths, the latest. Without K
    earlier tokens the latest one counts for the missing ones. Node i >= 1 is in chain (i - 1) % K,
    and its token is the one that followed the match at its depth, (i - 1) // K + 1. The text after
    a match ends at the bonus token; longer drafts repeat it from the match on.

    Args:
        text: Tokens by request row and position; receives the bonus tokens. Row 0, the row of pads,
            does not change.
        req_pool_indices: Request rows.
        seq_lens: Committed tokens, the positions of the bonus tokens: 1 to C - 1.
        bonus_tokens: Newest tokens.
        topk: Chains (K).
        width: Nodes of each tree, the root included (W).

    Returns:
        Token of each node, the root first, [B, W] int64.
    """
    rows, last = req_pool_indices, seq_lens.long()[:, None]
    write(text, (rows, last[:, 0]), bonus_tokens, rows > 0)
    texts = text[rows].scatter(1, last, bonus_tokens[:, None])  # also in row 0
    node = torch.arange(1, width, device=text.device)
    match = _matches(texts, last, topk)[:, (node - 1) % topk]
    source = match + 1 + (node - 1) // topk % (last - match)
    return texts.gather(1, torch.cat([last, source], 1))


def _matches(texts: torch.Tensor, last: torch.Tensor, topk: int) -> torch.Tensor:
    """Return the columns at which the K best matches end, [B, K]."""
    columns = torch.arange(texts.shape[1], device=texts.device)
    is_equal, length = torch.ones_like(texts, dtype=torch.bool), torch.zeros_like(texts)
    for back in range(MAX_MATCH):
        wanted = texts.gather(1, (last - back).clamp(min=0))
        is_equal = is_equal & (texts.roll(back, 1) == wanted) & (columns >= back)
        length = length + is_equal
    score = torch.where(columns < last, length * texts.shape[1] + columns, -1)
    return torch.minimum(score.topk(topk, 1).indices, last - 1)


@register_op(mutates_args=("text",))
def append_tokens(
    text: Annotated[torch.Tensor, "[R, C] int64, contiguous"],
    req_pool_indices: Annotated[torch.Tensor, "[B] int64"],
    seq_lens: Annotated[torch.Tensor, "[B] int32"],
    predict: Annotated[torch.Tensor, "[B * W] int64"],
    width: Annotated[int, "W >= 1"],
) -> None:
    """Write the tokens that follow each request's bonus token, ``text[row of b, seq + 1 + i]``.

    Columns behind the text are skipped.

    Args:
        text: Tokens by request row and position. Row 0, the row of pads, does not change.
        req_pool_indices: Request rows.
        seq_lens: Positions of the bonus tokens.
        predict: W tokens per request.
        width: Tokens per request (W).
    """
    columns = seq_lens[:, None] + torch.arange(1, width + 1, device=text.device)
    rows = req_pool_indices[:, None].expand_as(columns).flatten()
    write(text, (rows, columns.flatten()), predict, rows > 0)
