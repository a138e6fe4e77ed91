"""Counts, positions and bonus tokens for CUDA. Contracts: ``graphkit.ops.accepted``."""

from typing import Any

import torch
import triton
import triton.language as tl

from graphkit.ops.kernels.launch import launch
from graphkit.ops.kernels.packed import COUNTS, RUN, total_before


@triton.jit(do_not_specialize=["unfinished"])
def create_num_accepted_drafts_filter_kernel(
    num_accepted_drafts_filter, num_accepted_drafts, unfinished_index, seq_lens, unfinished
):
    """One program per request, which searches for it in unfinished_index."""
    request = tl.program_id(0)
    each = tl.arange(0, COUNTS)
    found = tl.zeros([COUNTS], tl.int32)
    for first in range(0, unfinished, COUNTS):
        entry = first + each
        index = tl.load(unfinished_index + entry, mask=entry < unfinished, other=-1)
        found += (index == request).to(tl.int32)
    tokens = tl.load(num_accepted_drafts + request) + 1
    kept = tl.where(tl.sum(found, 0) > 0, tokens, 0)
    tl.store(num_accepted_drafts_filter + request, kept)
    tl.store(seq_lens + request, tl.load(seq_lens + request) + tokens)


def launch_create_num_accepted_drafts_filter(given: Any) -> torch.Tensor:
    """Launch ``create_num_accepted_drafts_filter``."""
    num_accepted_drafts_filter: torch.Tensor = given.num_accepted_drafts.new_empty(
        given.num_accepted_drafts.shape
    )
    launch(
        create_num_accepted_drafts_filter_kernel, (given.seq_lens.numel(),), given,
        num_accepted_drafts_filter=num_accepted_drafts_filter,
        unfinished=given.unfinished_index.numel(),
    )  # fmt: skip
    return num_accepted_drafts_filter


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


def launch_create_extend_after_decode_spec_info(given: Any) -> None:
    """Launch ``create_extend_after_decode_spec_info``."""
    launch(
        create_extend_after_decode_spec_info_kernel, (given.seq_lens.numel(),), given,
        tokens=given.accept_tokens.numel(), size=given.positions.numel(),
    )  # fmt: skip
