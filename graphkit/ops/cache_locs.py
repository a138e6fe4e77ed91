"""Which KV slots accepted tokens come from, where they go, and which slots are free again.

Suffixes: B requests, W num_draft_tokens, N entries of a packed tensor.
"""

# ruff: noqa: ARG001 - a fake kernel has its op's signature
from __future__ import annotations

from typing import Any

import torch

from graphkit.ops.packed import find_places, read
from graphkit.ops.slot_arguments import Demands

_MOVES = Demands(
    "get_src_tgt_cache_loc",
    seq_lens="B",
    out_cache_loc="B*W",
    accept_index="N",
    num_accepted_drafts="B",
    draft_token_num="W",
    page_size="P",
)


@torch.library.custom_op("graphkit::get_src_tgt_cache_loc", mutates_args=(), device_types="cpu")
def get_src_tgt_cache_loc(
    seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
    accept_index: torch.Tensor,
    num_accepted_drafts: torch.Tensor,
    draft_token_num: int,
    page_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Plan the move of accepted tokens to the front of their requests' slots, page by page.

    One launch on the current stream; never synchronises, may be captured.

    Args:
        seq_lens: Committed tokens before this step's rows.
        out_cache_loc: Slots of this step's rows.
        accept_index: Rows that were accepted, of all requests, packed.
        num_accepted_drafts: Accepted tokens per request, bonus excluded.
        draft_token_num: Rows per request (W).
        page_size: Slots per page.

    Returns:
        src_cache_loc = out_cache_loc[accept_index], or the dummy slot 0 where there is no such row;
        tgt_cache_loc, zeros for ``get_target_cache_loc`` to fill; to_free_num_slots, the slots at
        each request's end that lie on no page of a kept token:
        (seq + W) - min(seq + drafts + 1 rounded up to whole pages, seq + W).

    Shapes:
        seq_lens, num_accepted_drafts: [B] int32. out_cache_loc: [B * W] int64.
        accept_index: [N] int32. Returns [N] and [N] like out_cache_loc, and [B] like seq_lens.
        Here and in the other ops of this module, every tensor may be int32 or int64.

    Raises:
        InputError: A shape, dtype, device or number does not fit.
    """
    _MOVES.check(
        seq_lens, out_cache_loc, accept_index, num_accepted_drafts, draft_token_num, page_size
    )
    tgt_cache_loc = torch.zeros_like(accept_index, dtype=out_cache_loc.dtype)
    src_cache_loc = read(out_cache_loc, (accept_index,), tgt_cache_loc)
    end = seq_lens + draft_token_num
    kept_pages = (seq_lens + num_accepted_drafts + page_size) // page_size
    to_free_num_slots = end - torch.minimum(kept_pages * page_size, end)
    return src_cache_loc, tgt_cache_loc, to_free_num_slots.to(seq_lens.dtype)


@get_src_tgt_cache_loc.register_fake
def _(
    seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
    accept_index: torch.Tensor,
    num_accepted_drafts: torch.Tensor,
    draft_token_num: int,
    page_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    src_cache_loc = out_cache_loc.new_empty(accept_index.shape)
    return src_cache_loc, torch.empty_like(src_cache_loc), seq_lens.new_empty(seq_lens.shape)


@get_src_tgt_cache_loc.register_kernel("cuda")
def _(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    from graphkit.ops.kernels.cache_locs import launch_get_src_tgt_cache_loc

    _MOVES.check(*arguments)
    with torch.cuda.device(arguments[0].device):
        return launch_get_src_tgt_cache_loc(*arguments)


_TARGETS = Demands(
    "get_target_cache_loc",
    tgt_cache_loc="targets!",
    to_free_slots="freed!",
    num_accepted_drafts="B",
    to_free_num_slots="B",
    out_cache_loc="B*W",
    num_verify_tokens="W",
)


@torch.library.custom_op(
    "graphkit::get_target_cache_loc",
    mutates_args=("tgt_cache_loc", "to_free_slots"),
    device_types="cpu",
)
def get_target_cache_loc(
    tgt_cache_loc: torch.Tensor,
    to_free_slots: torch.Tensor,
    num_accepted_drafts: torch.Tensor,
    to_free_num_slots: torch.Tensor,
    out_cache_loc: torch.Tensor,
    num_verify_tokens: int,
) -> None:
    """Name the slots that accepted tokens move to, and those that are free again.

    Of a request's W slots the first drafts + 1 are kept and the last ``to_free_num_slots[b]`` are
    freed; what lies between shares a page with kept ones. One launch on the current stream; never
    synchronises, may be captured. Places past the last request's are left as they are.

    Args:
        tgt_cache_loc: Gets the kept slots, packed: request b's begin at
            sum(num_accepted_drafts[:b]) + b.
        to_free_slots: Gets the freed slots, packed.
        num_accepted_drafts: Accepted tokens per request, bonus excluded.
        to_free_num_slots: Slots to free per request, as ``get_src_tgt_cache_loc`` returns them.
        out_cache_loc: Slots of this step's rows.
        num_verify_tokens: Rows per request (W).

    Shapes:
        tgt_cache_loc, to_free_slots: [N], any N, contiguous int64. out_cache_loc: [B * W] int64.
        num_accepted_drafts, to_free_num_slots: [B] int32.

    Raises:
        InputError: A shape, dtype, device or number does not fit.
    """
    _TARGETS.check(
        tgt_cache_loc, to_free_slots, num_accepted_drafts, to_free_num_slots, out_cache_loc,
        num_verify_tokens,
    )  # fmt: skip
    if num_accepted_drafts.numel() == 0:
        return
    slots = out_cache_loc.reshape(-1, num_verify_tokens)
    row, column, is_used = find_places(num_accepted_drafts + 1, tgt_cache_loc.numel())
    tgt_cache_loc.copy_(read(slots, (row, column), tgt_cache_loc, is_used))
    row, column, is_used = find_places(to_free_num_slots, to_free_slots.numel())
    column = column + num_verify_tokens - to_free_num_slots[row]
    to_free_slots.copy_(read(slots, (row, column), to_free_slots, is_used))


@get_target_cache_loc.register_kernel("cuda")
def _(*arguments: Any) -> None:
    from graphkit.ops.kernels.cache_locs import launch_get_target_cache_loc

    _TARGETS.check(*arguments)
    with torch.cuda.device(arguments[0].device):
        launch_get_target_cache_loc(*arguments)


_UNFINISHED = Demands(
    "filter_finished_cache_loc",
    out_cache_loc="slots!",
    tgt_cache_loc="targets",
    num_accepted_drafts="B",
    num_accepted_drafts_filter="B",
)


@torch.library.custom_op(
    "graphkit::filter_finished_cache_loc", mutates_args=("out_cache_loc",), device_types="cpu"
)
def filter_finished_cache_loc(
    out_cache_loc: torch.Tensor,
    tgt_cache_loc: torch.Tensor,
    num_accepted_drafts: torch.Tensor,
    num_accepted_drafts_filter: torch.Tensor,
) -> None:
    """Pack the slots of unfinished requests, leaving out those of finished ones.

    One launch on the current stream; never synchronises, may be captured. Places past the last
    request's are left as they are.

    Args:
        out_cache_loc: Gets the slots, packed: request b's begin at sum(filter[:b]).
        tgt_cache_loc: Slots of all requests, packed: request b's begin at
            sum(num_accepted_drafts[:b]) + b.
        num_accepted_drafts: Accepted tokens per request, bonus excluded.
        num_accepted_drafts_filter: Slots to take per request, 0 for a finished one; see
            ``create_num_accepted_drafts_filter``.

    Shapes:
        out_cache_loc: [N], any N, contiguous int64. tgt_cache_loc: [N], any N, int64.
        num_accepted_drafts, num_accepted_drafts_filter: [B] int32.

    Raises:
        InputError: A shape, dtype or device does not fit.
    """
    _UNFINISHED.check(out_cache_loc, tgt_cache_loc, num_accepted_drafts, num_accepted_drafts_filter)
    if num_accepted_drafts.numel() == 0:
        return
    tokens = (num_accepted_drafts + 1).clamp(min=0)
    begins = tokens.cumsum(0) - tokens
    row, column, is_used = find_places(num_accepted_drafts_filter, out_cache_loc.numel())
    out_cache_loc.copy_(read(tgt_cache_loc, (begins[row] + column,), out_cache_loc, is_used))


@filter_finished_cache_loc.register_kernel("cuda")
def _(*arguments: Any) -> None:
    from graphkit.ops.kernels.cache_locs import launch_filter_finished_cache_loc

    _UNFINISHED.check(*arguments)
    with torch.cuda.device(arguments[0].device):
        launch_filter_finished_cache_loc(*arguments)


@get_target_cache_loc.register_fake
@filter_finished_cache_loc.register_fake
def _(*_: object) -> None:
    """Nothing is returned, so there is no shape to tell."""
