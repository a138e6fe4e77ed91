"""Start of a step: the state of the requests that run in it.

Dimensions: B requests, R request rows.
"""

from __future__ import annotations

from typing import Annotated, Any

import torch

from graphkit.ops.registration import register_op

Running = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def empty_running(given: Any) -> Running:
    """Allocate the results of ``begin_step``."""
    rows = given.req_pool_indices
    return (
        torch.empty_like(rows),
        rows.new_empty(rows.shape, dtype=torch.int32),
        rows.new_empty(rows.shape),
    )


@register_op(fake=empty_running)
def begin_step(
    req_pool_indices: Annotated[torch.Tensor, "[B] int64"],
    remaining: Annotated[torch.Tensor, "[R] int32"],
    seq_lens: Annotated[torch.Tensor, "[R] int32"],
    bonus_tokens: Annotated[torch.Tensor, "[R] int64"],
) -> Running:
    """Read the state of each request, and of row 0 in the place of those that have ended.

    Args:
        req_pool_indices: Request rows.
        remaining: Tokens that may still be new, by request row; 0 once the request has ended.
        seq_lens: Committed tokens by request row.
        bonus_tokens: Newest token by request row.

    Returns:
        The rows, with 0 for ended requests, [B] int64; their committed tokens, [B] int32; their
        newest tokens, [B] int64.
    """
    rows = torch.where(remaining[req_pool_indices] > 0, req_pool_indices, 0)
    return rows, seq_lens[rows], bonus_tokens[rows]
