"""Slots from ``req_to_token`` for CUDA. Contracts: ``graphkit.ops.slot_assignment``."""

import torch
import triton
import triton.language as tl

from graphkit.ops.kernels.packed import COUNTS, copy_run


@triton.jit
def _lengths_before(start_offset, end_offset, end):
    """Sum of the first ``end`` lengths; one below 0 counts as 0."""
    each = tl.arange(0, COUNTS)
    totals = tl.zeros([COUNTS], tl.int64)
    for first in range(0, end, COUNTS):
        at = first + each
        until = tl.load(end_offset + at, mask=at < end, other=0)
        totals += tl.maximum(until - tl.load(start_offset + at, mask=at < end, other=0), 0)
    return tl.sum(totals, 0)


@triton.jit(do_not_specialize=["rows", "places"])
def assign_extend_cache_locs_kernel(
    req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, rows, context, places
):
    """One program per request."""
    request = tl.program_id(0)
    place = _lengths_before(start_offset, end_offset, request)
    start = tl.load(start_offset + request)
    length = tl.load(end_offset + request) - start
    row = tl.load(req_pool_indices + request).to(tl.int64)
    length = tl.where((row >= 0) & (row < rows), length, 0)
    tokens = req_to_token + row * context
    copy_run(out_cache_loc, place, places, tokens, start, context, length)


def launch_assign_extend_cache_locs(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
) -> None:
    """Launch on the current stream; as the op of that name."""
    if requests := req_pool_indices.numel():
        assign_extend_cache_locs_kernel[(requests,)](
            req_pool_indices.contiguous(), req_to_token.contiguous(), start_offset.contiguous(),
            end_offset.contiguous(), out_cache_loc, *req_to_token.shape, out_cache_loc.numel(),
        )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "places", "drafts"])
def assign_draft_cache_locs_contiguous_kernel(
    req_pool_indices, req_to_token, seq_lens, out_cache_loc, rows, context, places, drafts
):
    """One program per request."""
    request = tl.program_id(0).to(tl.int64)
    row = tl.load(req_pool_indices + request).to(tl.int64)
    length = tl.where((row >= 0) & (row < rows), drafts, 0)
    tokens, seq_len = req_to_token + row * context, tl.load(seq_lens + request)
    copy_run(out_cache_loc, request * drafts, places, tokens, seq_len, context, length)


def launch_assign_draft_cache_locs_contiguous(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
    topk: int,
    num_steps: int,
) -> None:
    """Launch on the current stream; as the op of that name."""
    if requests := req_pool_indices.numel():
        assign_draft_cache_locs_contiguous_kernel[(requests,)](
            req_pool_indices.contiguous(), req_to_token.contiguous(), seq_lens.contiguous(),
            out_cache_loc, *req_to_token.shape, out_cache_loc.numel(), topk * num_steps,
        )  # fmt: skip
