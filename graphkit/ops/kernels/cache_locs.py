"""Slots of accepted tokens for CUDA. Contracts: ``graphkit.ops.cache_locs``."""

from typing import Any

import torch
import triton
import triton.language as tl

from graphkit.ops.kernels.launch import launch
from graphkit.ops.kernels.packed import copy_run, total_before

BLOCK = 256


@triton.jit(do_not_specialize=["requests", "slots", "entries"])
def get_src_tgt_cache_loc_kernel(
    src_cache_loc, tgt_cache_loc, to_free_num_slots,
    seq_lens, out_cache_loc, accept_index, num_accepted_drafts,
    requests, slots, entries, draft_token_num, page_size, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK entries of ``accept_index`` and BLOCK requests per program."""
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(accept_index + entry, mask=entry < entries, other=-1)
    slot = tl.load(out_cache_loc + row, mask=(row >= 0) & (row < slots), other=0)
    tl.store(src_cache_loc + entry, slot, mask=entry < entries)
    tl.store(tgt_cache_loc + entry, tl.zeros_like(slot), mask=entry < entries)

    is_request = entry < requests
    seq_len = tl.load(seq_lens + entry, mask=is_request, other=0)
    drafts = tl.load(num_accepted_drafts + entry, mask=is_request, other=0)
    end = seq_len + draft_token_num
    kept = (seq_len + drafts + page_size) // page_size * page_size
    tl.store(to_free_num_slots + entry, end - tl.minimum(kept, end), mask=is_request)


def launch_get_src_tgt_cache_loc(given: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launch ``get_src_tgt_cache_loc``."""
    requests, entries = given.seq_lens.numel(), given.accept_index.numel()
    src_cache_loc = given.out_cache_loc.new_empty(entries)
    tgt_cache_loc = given.out_cache_loc.new_empty(entries)
    to_free_num_slots = given.seq_lens.new_empty(requests)
    launch(
        get_src_tgt_cache_loc_kernel, (triton.cdiv(max(requests, entries), BLOCK),), given,
        src_cache_loc=src_cache_loc, tgt_cache_loc=tgt_cache_loc,
        to_free_num_slots=to_free_num_slots, requests=requests,
        slots=given.out_cache_loc.numel(), entries=entries, BLOCK=BLOCK,
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
    start = total_before(num_accepted_drafts, request, 1)
    tokens = tl.load(num_accepted_drafts + request) + 1
    copy_run(tgt_cache_loc, start, targets, slots, 0, num_verify_tokens, tokens)
    start = total_before(to_free_num_slots, request, 0)
    free = tl.load(to_free_num_slots + request)
    begin = num_verify_tokens - free
    copy_run(to_free_slots, start, freed, slots, begin, num_verify_tokens, free)


def launch_get_target_cache_loc(given: Any) -> None:
    """Launch ``get_target_cache_loc``."""
    launch(
        get_target_cache_loc_kernel, (given.num_accepted_drafts.numel(),), given,
        targets=given.tgt_cache_loc.numel(), freed=given.to_free_slots.numel(),
    )  # fmt: skip


@triton.jit(do_not_specialize=["slots", "targets"])
def filter_finished_cache_loc_kernel(
    out_cache_loc, tgt_cache_loc, num_accepted_drafts, num_accepted_drafts_filter, slots, targets
):
    """One program per request."""
    request = tl.program_id(0)
    start = total_before(num_accepted_drafts_filter, request, 0)
    begin = total_before(num_accepted_drafts, request, 1)
    taken = tl.load(num_accepted_drafts_filter + request)
    copy_run(out_cache_loc, start, slots, tgt_cache_loc, begin, targets, taken)


def launch_filter_finished_cache_loc(given: Any) -> None:
    """Launch ``filter_finished_cache_loc``."""
    launch(
        filter_finished_cache_loc_kernel, (given.num_accepted_drafts.numel(),), given,
        slots=given.out_cache_loc.numel(), targets=given.tgt_cache_loc.numel(),
    )  # fmt: skip
