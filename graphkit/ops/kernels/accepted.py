"""Counts, positions and bonus tokens for CUDA. Contracts: ``graphkit.ops.accepted``."""

import torch
import triton
import triton.language as tl

from graphkit.ops.kernels.packed import COUNTS, RUN, total_before

BLOCK = 256


@triton.jit(do_not_specialize=["unfinished"])
def create_num_accepted_drafts_filter_kernel(
    num_accepted_drafts_filter, num_accepted_drafts, unfinished_index, seq_lens, unfinished
):
    """One program per request, which looks for itself among the unfinished."""
    request = tl.program_id(0)
    each = tl.arange(0, COUNTS)
    found = tl.zeros([COUNTS], tl.int32)
    for first in range(0, unfinished, COUNTS):
        at = first + each
        index = tl.load(unfinished_index + at, mask=at < unfinished, other=-1)
        found += (index == request).to(tl.int32)
    tokens = tl.load(num_accepted_drafts + request) + 1
    kept = tl.where(tl.sum(found, 0) > 0, tokens, 0)
    tl.store(num_accepted_drafts_filter + request, kept)
    tl.store(seq_lens + request, tl.load(seq_lens + request) + tokens)


def launch_create_num_accepted_drafts_filter(
    num_accepted_drafts: torch.Tensor, unfinished_index: torch.Tensor, seq_lens: torch.Tensor
) -> torch.Tensor:
    """Launch on the current stream; as the op of that name."""
    num_accepted_drafts_filter = num_accepted_drafts.new_empty(num_accepted_drafts.shape)
    if requests := num_accepted_drafts.numel():
        create_num_accepted_drafts_filter_kernel[(requests,)](
            num_accepted_drafts_filter, num_accepted_drafts.contiguous(),
            unfinished_index.contiguous(), seq_lens, unfinished_index.numel(),
        )  # fmt: skip
    return num_accepted_drafts_filter


@triton.jit(do_not_specialize=["tokens", "places"])
def create_extend_after_decode_spec_info_kernel(
    accept_tokens, seq_lens, num_accepted_tokens, positions, bonus_tokens, tokens, places
):
    """One program per request."""
    request = tl.program_id(0)
    begin = total_before(num_accepted_tokens, request, 0)
    accepted = tl.load(num_accepted_tokens + request)
    first_position = tl.load(seq_lens + request) - accepted
    for first in range(0, tl.minimum(accepted, places), RUN):
        column = first + tl.arange(0, RUN)
        filled = (column < accepted) & (begin + column < places)
        tl.store(positions + begin + column, first_position + column, mask=filled)
    last = begin + accepted - 1
    has_bonus = (accepted > 0) & (last < tokens)
    tl.store(bonus_tokens + request, tl.load(accept_tokens + last, mask=has_bonus), mask=has_bonus)


def launch_create_extend_after_decode_spec_info(
    accept_tokens: torch.Tensor,
    seq_lens: torch.Tensor,
    num_accepted_tokens: torch.Tensor,
    positions: torch.Tensor,
    bonus_tokens: torch.Tensor,
) -> None:
    """Launch on the current stream; as the op of that name."""
    if requests := seq_lens.numel():
        create_extend_after_decode_spec_info_kernel[(requests,)](
            accept_tokens.contiguous(), seq_lens.contiguous(), num_accepted_tokens.contiguous(),
            positions, bonus_tokens, accept_tokens.numel(), positions.numel(),
        )  # fmt: skip


@triton.jit(do_not_specialize=["requests", "stride"])
def fill_bonus_tokens_kernel(
    accept_tokens, num_accepted_tokens, bonus_tokens, requests, stride, BLOCK: tl.constexpr
):
    """BLOCK requests per program."""
    request = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_request = request < requests
    accepted = tl.load(num_accepted_tokens + request, mask=is_request, other=0)
    has_bonus = is_request & (accepted >= 1) & (accepted <= stride)
    at = request * stride + accepted - 1
    tl.store(bonus_tokens + request, tl.load(accept_tokens + at, mask=has_bonus), mask=has_bonus)


def launch_fill_bonus_tokens(
    accept_tokens: torch.Tensor,
    num_accepted_tokens: torch.Tensor,
    bonus_tokens: torch.Tensor,
    stride: int,
) -> None:
    """Launch on the current stream; as the op of that name, ``accept_tokens`` flat."""
    if requests := bonus_tokens.numel():
        fill_bonus_tokens_kernel[(triton.cdiv(requests, BLOCK),)](
            accept_tokens, num_accepted_tokens.contiguous(), bonus_tokens, requests, stride,
            BLOCK=BLOCK,
        )  # fmt: skip
