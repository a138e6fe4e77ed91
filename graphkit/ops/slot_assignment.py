"""Assignment of the slots of ``req_to_token`` to the rows of a batch.

Suffixes: B requests, K topk, S num_steps, N rows that are extended.
"""

from __future__ import annotations

from typing import Annotated

import torch

from graphkit.ops.packed import locate, read
from graphkit.ops.registration import register_op


@register_op(mutates_args=("out_cache_loc",))
def assign_extend_cache_locs(
    req_pool_indices: Annotated[torch.Tensor, "[B] int32 or int64"],
    req_to_token: Annotated[torch.Tensor, "[rows, context] int32 or int64"],
    start_offset: Annotated[torch.Tensor, "[B] int32 or int64"],
    end_offset: Annotated[torch.Tensor, "[B] int32 or int64"],
    out_cache_loc: Annotated[torch.Tensor, "[N] int32 or int64, contiguous"],
) -> None:
    """Pack the slots ``req_to_token[row of b, start:end]`` of every request into out_cache_loc.

    Entries behind the last request's, and those whose slot would be outside the table, keep their
    values. One launch on the current stream. Never synchronises; may be captured.

    Args:
        req_pool_indices: Row of ``req_to_token`` per request.
        req_to_token: Slot of each token of each request.
        start_offset: First position to take.
        end_offset: Position behind the last one; at or before the first for none.
        out_cache_loc: Receives the slots; request b's begin at sum(end - start) of those before
            it.

    Shapes:
        req_pool_indices: [B] int64. req_to_token: [rows, context] int32.
        start_offset, end_offset: [B] int32. out_cache_loc: [N] int64 for any N, contiguous.
        All may be int32 or int64.

    Raises:
        InputError: A tensor has the wrong shape, dtype, device or layout.
    """
    if req_pool_indices.numel() == 0:
        return
    request, column, is_used = locate(end_offset - start_offset, out_cache_loc.numel())
    token = (req_pool_indices[request], start_offset[request] + column)
    out_cache_loc.copy_(read(req_to_token, token, out_cache_loc, is_used))


@register_op(mutates_args=("out_cache_loc",))
def assign_draft_cache_locs_contiguous(
    req_pool_indices: Annotated[torch.Tensor, "[B] int32 or int64"],
    req_to_token: Annotated[torch.Tensor, "[rows, context] int32 or int64"],
    seq_lens: Annotated[torch.Tensor, "[B] int32 or int64"],
    out_cache_loc: Annotated[torch.Tensor, "[B * K * S] int32 or int64, contiguous"],
    topk: Annotated[int, "K >= 1"],
    num_steps: Annotated[int, "S >= 1"],
) -> None:
    """Take the K * S slots behind each request's committed tokens for its draft tokens.

    A draft runner reads them as [B, K, S]. Entries whose slot would be outside the table keep
    their values. One launch on the current stream. Never synchronises; may be captured.

    Args:
        req_pool_indices: Row of ``req_to_token`` per request.
        req_to_token: Slot of each token of each request.
        seq_lens: Committed tokens.
        out_cache_loc: Receives the slots ``req_to_token[row of b, seq : seq + K * S]`` at
            b * K * S.
        topk: Branches (K).
        num_steps: Draft tokens per branch (S).

    Shapes:
        req_pool_indices: [B] int64. req_to_token: [rows, context] int32. seq_lens: [B] int32.
        out_cache_loc: [B * K * S] int64, contiguous. All may be int32 or int64.

    Raises:
        InputError: A tensor has the wrong shape, dtype, device or layout, or a number is below 1.
    """
    draft = torch.arange(topk * num_steps, device=seq_lens.device)
    token = (req_pool_indices[:, None], seq_lens[:, None] + draft)
    slots = out_cache_loc.view(-1, topk * num_steps)
    slots.copy_(read(req_to_token, token, slots))
