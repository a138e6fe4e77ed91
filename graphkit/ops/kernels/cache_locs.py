"""Slots of accepted tokens for CUDA. Contracts: ``graphkit.ops.cache_locs``."""

import torch
import triton
import triton.language as tl

from graphkit.ops.kernels.packed import copy_run, total_before

BLOCK = 256


@triton.jit(do_not_specialize=["requests", "slots", "entries"])
def get_src_tgt_cache_loc_kernel(
    src_cache_loc, tgt_cache_loc, to_free_num_slots,
    seq_lens, out_cache_loc, accept_index, num_accepted_drafts,
    requests, slots, entries, draft_token_num, page_size, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK entries of ``accept_index`` and BLOCK requests per program."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(accept_index + at, mask=at < entries, other=-1)
    slot = tl.load(out_cache_loc + row, mask=(row >= 0) & (row < slots), other=0)
    tl.store(src_cache_loc + at, slot, mask=at < entries)
    tl.store(tgt_cache_loc + at, tl.zeros_like(slot), mask=at < entries)

    is_request = at < requests
    seq_len = tl.load(seq_lens + at, mask=is_request, other=0)
    drafts = tl.load(num_accepted_drafts + at, mask=is_request, other=0)
    end = seq_len + draft_token_num
    kept = (seq_len + drafts + page_size) // page_size * page_size
    tl.store(to_free_num_slots + at, end - tl.minimum(kept, end), mask=is_request)


def launch_get_src_tgt_cache_loc(
    seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
    accept_index: torch.Tensor,
    num_accepted_drafts: torch.Tensor,
    draft_token_num: int,
    page_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launch on the current stream; as the op of that name."""
    requests, entries = seq_lens.numel(), accept_index.numel()
    src_cache_loc = out_cache_loc.new_empty(entries)
    tgt_cache_loc = out_cache_loc.new_empty(entries)
    to_free_num_slots = seq_lens.new_empty(requests)
    if requests or entries:
        get_src_tgt_cache_loc_kernel[(triton.cdiv(max(requests, entries), BLOCK),)](
            src_cache_loc, tgt_cache_loc, to_free_num_slots,
            seq_lens.contiguous(), out_cache_loc.contiguous(), accept_index.contiguous(),
            num_accepted_drafts.contiguous(),
            requests, out_cache_loc.numel(), entries, draft_token_num, page_size, BLOCK=BLOCK,
        )  # fmt: skip
    return src_cache_loc, tgt_cache_loc, to_free_num_slots


@triton.jit(do_not_specialize=["targets", "freed"])
def get_target_cache_loc_kernel(
    tgt_cache_loc, to_free_slots, num_accepted_drafts, to_free_num_slots, out_cache_loc,
    targets, freed, num_verify_tokens,
):  # fmt: skip
    """One program per request."""
    request = tl.program_id(0)
    slots = out_cache_loc + request.to(tl.int64) * num_verify_tokens
    place = total_before(num_accepted_drafts, request, 1)
    tokens = tl.load(num_accepted_drafts + request) + 1
    copy_run(tgt_cache_loc, place, targets, slots, 0, num_verify_tokens, tokens)
    place = total_before(to_free_num_slots, request, 0)
    free = tl.load(to_free_num_slots + request)
    begin = num_verify_tokens - free
    copy_run(to_free_slots, place, freed, slots, begin, num_verify_tokens, free)


def launch_get_target_cache_loc(
    tgt_cache_loc: torch.Tensor,
    to_free_slots: torch.Tensor,
    num_accepted_drafts: torch.Tensor,
    to_free_num_slots: torch.Tensor,
    out_cache_loc: torch.Tensor,
    num_verify_tokens: int,
) -> None:
    """Launch on the current stream; as the op of that name."""
    if requests := num_accepted_drafts.numel():
        get_target_cache_loc_kernel[(requests,)](
            tgt_cache_loc, to_free_slots, num_accepted_drafts.contiguous(),
            to_free_num_slots.contiguous(), out_cache_loc.contiguous(),
            tgt_cache_loc.numel(), to_free_slots.numel(), num_verify_tokens,
        )  # fmt: skip


@triton.jit(do_not_specialize=["slots", "targets"])
def filter_finished_cache_loc_kernel(
    out_cache_loc, tgt_cache_loc, num_accepted_drafts, num_accepted_drafts_filter, slots, targets
):
    """One program per request."""
    request = tl.program_id(0)
    place = total_before(num_accepted_drafts_filter, request, 0)
    begin = total_before(num_accepted_drafts, request, 1)
    taken = tl.load(num_accepted_drafts_filter + request)
    copy_run(out_cache_loc, place, slots, tgt_cache_loc, begin, targets, taken)


def launch_filter_finished_cache_loc(
    out_cache_loc: torch.Tensor,
    tgt_cache_loc: torch.Tensor,
    num_accepted_drafts: torch.Tensor,
    num_accepted_drafts_filter: torch.Tensor,
) -> None:
    """Launch on the current stream; as the op of that name."""
    if requests := num_accepted_drafts.numel():
        filter_finished_cache_loc_kernel[(requests,)](
            out_cache_loc, tgt_cache_loc.contiguous(), num_accepted_drafts.contiguous(),
            num_accepted_drafts_filter.contiguous(), out_cache_loc.numel(), tgt_cache_loc.numel(),
        )  # fmt: skip
