"""Accepted tokens of a batch for CUDA. Contracts: ``graphkit.ops.packed_accepted``."""

from typing import Any

import torch
import triton
import triton.language as tl

from graphkit.ops.kernels.launch import launch

COUNTS = tl.constexpr(256)
"""Requests whose counts a program adds up at a time."""
RUN = tl.constexpr(128)
"""Numbers of a run that a program copies at a time."""
BLOCK = 256
"""Entries of a program."""


@triton.jit
def total_before(counts, end, plus: tl.constexpr):
    """Return the sum of the first ``end`` counts plus ``plus`` each; a negative one counts as 0."""
    each = tl.arange(0, COUNTS)
    totals = tl.zeros([COUNTS], tl.int64)
    for first in range(0, end, COUNTS):
        inside = first + each < end
        count = tl.load(counts + first + each, mask=inside, other=0) + plus
        totals += tl.where(inside & (count > 0), count, 0)
    return tl.sum(totals, 0)


@triton.jit
def copy_run(target, target_begin, target_size, source, source_begin, source_size, length):
    """Copy ``length`` consecutive numbers, except those outside the target or the source."""
    each = tl.arange(0, RUN)
    for first in range(0, tl.minimum(length, target_size), RUN):
        to = target_begin + first + each
        at = source_begin + first + each
        copied = (first + each < length) & (to >= 0) & (to < target_size)
        copied = copied & (at >= 0) & (at < source_size)
        tl.store(target + to, tl.load(source + at, mask=copied), mask=copied)


@triton.jit(do_not_specialize=["unfinished"])
def create_num_accepted_drafts_filter_kernel(
    num_accepted_drafts_filter, num_accepted_drafts, unfinished_index, seq_lens, unfinished
):
    """One program per request, which searches for it in unfinished_index."""
    request = tl.program_id(0)
    each = tl.arange(0, COUNTS)
    matches = tl.zeros([COUNTS], tl.int32)
    for first in range(0, unfinished, COUNTS):
        entry = first + each
        index = tl.load(unfinished_index + entry, mask=entry < unfinished, other=-1)
        matches += (index == request).to(tl.int32)
    tokens = tl.load(num_accepted_drafts + request) + 1
    kept = tl.where(tl.sum(matches, 0) > 0, tokens, 0)
    tl.store(num_accepted_drafts_filter + request, kept)
    tl.store(seq_lens + request, tl.load(seq_lens + request) + tokens)


def launch_create_num_accepted_drafts_filter(args: Any, kept: torch.Tensor) -> None:
    """Launch ``create_num_accepted_drafts_filter``."""
    launch(
        create_num_accepted_drafts_filter_kernel, (args.seq_lens.numel(),), args,
        num_accepted_drafts_filter=kept, unfinished=args.unfinished_index.numel(),
    )  # fmt: skip


@triton.jit(do_not_specialize=["tokens", "size"])
def create_extend_after_decode_spec_info_kernel(
    accept_tokens, seq_lens, num_accepted_tokens, positions, bonus_tokens, tokens, size
):
    """One program per request."""
    request = tl.program_id(0)
    begin = total_before(num_accepted_tokens, request, 0)
    accepted = tl.load(num_accepted_tokens + request)
    first_position = tl.load(seq_lens + request) - accepted
    for first in range(0, tl.minimum(accepted, size), RUN):
        column = first + tl.arange(0, RUN)
        filled = (column < accepted) & (begin + column < size)
        tl.store(positions + begin + column, first_position + column, mask=filled)
    last = begin + accepted - 1
    has_bonus = (accepted > 0) & (last < tokens)
    tl.store(bonus_tokens + request, tl.load(accept_tokens + last, mask=has_bonus), mask=has_bonus)


def launch_create_extend_after_decode_spec_info(args: Any) -> None:
    """Launch ``create_extend_after_decode_spec_info``."""
    launch(
        create_extend_after_decode_spec_info_kernel, (args.seq_lens.numel(),), args,
        tokens=args.accept_tokens.numel(), size=args.positions.numel(),
    )  # fmt: skip


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


def launch_get_src_tgt_cache_loc(args: Any, results: tuple[torch.Tensor, ...]) -> None:
    """Launch ``get_src_tgt_cache_loc``."""
    requests, entries = args.seq_lens.numel(), args.accept_index.numel()
    src_cache_loc, tgt_cache_loc, to_free_num_slots = results
    launch(
        get_src_tgt_cache_loc_kernel, (triton.cdiv(max(requests, entries), BLOCK),), args,
        src_cache_loc=src_cache_loc, tgt_cache_loc=tgt_cache_loc,
        to_free_num_slots=to_free_num_slots, requests=requests,
        slots=args.out_cache_loc.numel(), entries=entries, BLOCK=BLOCK,
    )  # fmt: skip


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


def launch_get_target_cache_loc(args: Any) -> None:
    """Launch ``get_target_cache_loc``."""
    launch(
        get_target_cache_loc_kernel, (args.num_accepted_drafts.numel(),), args,
        targets=args.tgt_cache_loc.numel(), freed=args.to_free_slots.numel(),
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


def launch_filter_finished_cache_loc(args: Any) -> None:
    """Launch ``filter_finished_cache_loc``."""
    launch(
        filter_finished_cache_loc_kernel, (args.num_accepted_drafts.numel(),), args,
        slots=args.out_cache_loc.numel(), targets=args.tgt_cache_loc.numel(),
    )  # fmt: skip
