"""Accepted tokens of a batch, packed: their counts, positions and KV slots.

``num_accepted_drafts`` excludes the bonus token, ``num_accepted_tokens`` includes it; no op here
changes either.

Dimensions: B requests, W rows of each, U unfinished requests, N and M entries of packed tensors,
F slots to free, P page size.
"""

from __future__ import annotations

from typing import Annotated

import torch

from graphkit.ops.packed import locate, read
from graphkit.ops.registration import register_op


@register_op(mutates_args=("seq_lens",))
def create_num_accepted_drafts_filter(
    num_accepted_drafts: Annotated[torch.Tensor, "[B] int32 or int64"],
    unfinished_index: Annotated[torch.Tensor, "[U] int32 or int64"],
    seq_lens: Annotated[torch.Tensor, "[B] int32 or int64, contiguous"],
) -> Annotated[torch.Tensor, "[B] num_accepted_drafts.dtype"]:
    """Count the slots that unfinished requests keep, and commit the accepted tokens.

    Args:
        num_accepted_drafts: Accepted tokens per request, bonus token excluded; not changed.
        unfinished_index: Requests that continue; an index outside the batch is ignored.
        seq_lens: Committed tokens; drafts + 1 is added for every request, finished or not.

    Returns:
        drafts + 1 for an unfinished request, 0 for a finished one; [B] of the dtype of
        num_accepted_drafts.
    """
    request = torch.arange(seq_lens.numel(), device=seq_lens.device)
    is_unfinished = (request[:, None] == unfinished_index).any(1)
    num_accepted_tokens = num_accepted_drafts + 1
    seq_lens += num_accepted_tokens
    return torch.where(is_unfinished, num_accepted_tokens, 0)


@register_op(mutates_args=("positions", "bonus_tokens"))
def create_extend_after_decode_spec_info(
    accept_tokens: Annotated[torch.Tensor, "[N] int32 or int64"],
    seq_lens: Annotated[torch.Tensor, "[B] int32 or int64"],
    num_accepted_tokens: Annotated[torch.Tensor, "[B] int32 or int64"],
    positions: Annotated[torch.Tensor, "[M] int32 or int64, contiguous"],
    bonus_tokens: Annotated[torch.Tensor, "[B] int32 or int64, contiguous"],
) -> None:
    """Write the position of each accepted token and the bonus token of each request.

    For DRAFT_EXTEND, whose rows are the accepted tokens alone. Positions behind the last request's
    and the bonus token of a request without accepted tokens keep their values.

    Args:
        accept_tokens: Accepted tokens, bonus tokens included, packed.
        seq_lens: Committed tokens, the accepted ones included.
        num_accepted_tokens: Accepted tokens per request (n), bonus token included.
        positions: Receives seq_lens - n to seq_lens - 1 per request, packed. M is N or more.
        bonus_tokens: Receives the last accepted token of each request.
    """
    if seq_lens.numel() == 0:
        return
    request, column, is_used = locate(num_accepted_tokens, positions.numel())
    position = (seq_lens - num_accepted_tokens)[request] + column
    positions.copy_(torch.where(is_used, position, positions))
    last = num_accepted_tokens.clamp(min=0).cumsum(0) - 1
    bonus_tokens.copy_(read(accept_tokens, (last,), bonus_tokens, num_accepted_tokens > 0))


@register_op()
def get_src_tgt_cache_loc(
    seq_lens: Annotated[torch.Tensor, "[B] int32 or int64"],
    out_cache_loc: Annotated[torch.Tensor, "[B * W] int32 or int64"],
    accept_index: Annotated[torch.Tensor, "[N] int32 or int64"],
    num_accepted_drafts: Annotated[torch.Tensor, "[B] int32 or int64"],
    draft_token_num: Annotated[int, "W >= 1"],
    page_size: Annotated[int, "P >= 1"],
) -> tuple[
    Annotated[torch.Tensor, "[N] out_cache_loc.dtype"],
    Annotated[torch.Tensor, "[N] out_cache_loc.dtype"],
    Annotated[torch.Tensor, "[B] seq_lens.dtype"],
]:
    """Plan the move of accepted tokens to the front of their requests' slots, page by page.

    Contract of SGLang's function of this name (spec_utils.py).

    Args:
        seq_lens: Committed tokens before this step's rows.
        out_cache_loc: Slots of this step's rows.
        accept_index: Accepted rows of all requests, packed.
        num_accepted_drafts: Accepted tokens per request, bonus token excluded.
        draft_token_num: Rows per request (W).
        page_size: Slots per page.

    Returns:
        A tuple of three tensors:

        src_cache_loc: [N], out_cache_loc[accept_index], or the dummy slot 0 where there is no such
        row.
        tgt_cache_loc: [N], zeros, for ``get_target_cache_loc`` to fill.
        to_free_num_slots: [B], slots at each request's end on pages without a kept token, (seq + W)
        - min(seq + drafts + 1 rounded up to whole pages, seq + W).
    """
    tgt_cache_loc = torch.zeros_like(accept_index, dtype=out_cache_loc.dtype)
    src_cache_loc = read(out_cache_loc, (accept_index,), tgt_cache_loc)
    end = seq_lens + draft_token_num
    kept_pages = (seq_lens + num_accepted_drafts + page_size) // page_size
    to_free_num_slots = end - torch.minimum(kept_pages * page_size, end)
    return src_cache_loc, tgt_cache_loc, to_free_num_slots.to(seq_lens.dtype)


@register_op(mutates_args=("tgt_cache_loc", "to_free_slots"))
def get_target_cache_loc(
    tgt_cache_loc: Annotated[torch.Tensor, "[N] int32 or int64, contiguous"],
    to_free_slots: Annotated[torch.Tensor, "[F] int32 or int64, contiguous"],
    num_accepted_drafts: Annotated[torch.Tensor, "[B] int32 or int64"],
    to_free_num_slots: Annotated[torch.Tensor, "[B] int32 or int64"],
    out_cache_loc: Annotated[torch.Tensor, "[B * W] int32 or int64"],
    num_verify_tokens: Annotated[int, "W >= 1"],
) -> None:
    """Write the slots that accepted tokens move to, and the slots to free.

    Of a request's W slots the first drafts + 1 are kept and the last ``to_free_num_slots[b]`` are
    freed. Slots between them share a page with kept ones. Entries behind the last request's keep
    their values. Contract of SGLang's kernel of this name (spec_utils.py).

    Args:
        tgt_cache_loc: Receives the kept slots, packed: request b's begin at
            sum(num_accepted_drafts[:b]) + b.
        to_free_slots: Receives the freed slots, packed.
        num_accepted_drafts: Accepted tokens per request, bonus token excluded.
        to_free_num_slots: Slots to free per request, as ``get_src_tgt_cache_loc`` returns them.
        out_cache_loc: Slots of this step's rows.
        num_verify_tokens: Rows per request (W).
    """
    if num_accepted_drafts.numel() == 0:
        return
    slots = out_cache_loc.reshape(-1, num_verify_tokens)
    row, column, is_used = locate(num_accepted_drafts + 1, tgt_cache_loc.numel())
    tgt_cache_loc.copy_(read(slots, (row, column), tgt_cache_loc, is_used))
    row, column, is_used = locate(to_free_num_slots, to_free_slots.numel())
    column = column + num_verify_tokens - to_free_num_slots[row]
    to_free_slots.copy_(read(slots, (row, column), to_free_slots, is_used))


@register_op(mutates_args=("out_cache_loc",))
def filter_finished_cache_loc(
    out_cache_loc: Annotated[torch.Tensor, "[M] int32 or int64, contiguous"],
    tgt_cache_loc: Annotated[torch.Tensor, "[N] int32 or int64"],
    num_accepted_drafts: Annotated[torch.Tensor, "[B] int32 or int64"],
    num_accepted_drafts_filter: Annotated[torch.Tensor, "[B] int32 or int64"],
) -> None:
    """Pack the slots of unfinished requests.

    Entries behind the last request's keep their values. Contract of SGLang's
    ``filter_finished_cache_loc_kernel`` (spec_utils.py).

    Args:
        out_cache_loc: Receives the slots, packed: request b's begin at sum(filter[:b]).
        tgt_cache_loc: Slots of all requests, packed: request b's begin at
            sum(num_accepted_drafts[:b]) + b.
        num_accepted_drafts: Accepted tokens per request, bonus token excluded.
        num_accepted_drafts_filter: Slots to take per request, 0 for a finished one; see
            ``create_num_accepted_drafts_filter``.
    """
    if num_accepted_drafts.numel() == 0:
        return
    tokens = (num_accepted_drafts + 1).clamp(min=0)
    begins = tokens.cumsum(0) - tokens
    row, column, is_used = locate(num_accepted_drafts_filter, out_cache_loc.numel())
    out_cache_loc.copy_(read(tgt_cache_loc, (begins[row] + column,), out_cache_loc, is_used))
