"""Slots from ``req_to_token`` for CUDA. Contracts: ``graphkit.ops.slot_assignment``."""

from typing import Any

import triton
import triton.language as tl

from graphkit.ops.kernels.launch import launch
from graphkit.ops.kernels.packed import COUNTS, copy_run


@triton.jit
def _lengths_before(start_offset, end_offset, end):
    """Return the sum of the first ``end`` lengths; a negative one counts as 0."""
    each = tl.arange(0, COUNTS)
    totals = tl.zeros([COUNTS], tl.int64)
    for first in range(0, end, COUNTS):
        request = first + each
        is_before = request < end
        starts = tl.load(start_offset + request, mask=is_before, other=0)
        ends = tl.load(end_offset + request, mask=is_before, other=0)
        totals += tl.maximum(ends - starts, 0)
    return tl.sum(totals, 0)


@triton.jit(do_not_specialize=["rows", "size"])
def assign_extend_cache_locs_kernel(
    req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, rows, context, size
):
    """One program per request."""
    request = tl.program_id(0)
    target = _lengths_before(start_offset, end_offset, request)
    start = tl.load(start_offset + request)
    length = tl.load(end_offset + request) - start
    row = tl.load(req_pool_indices + request).to(tl.int64)
    length = tl.where((row >= 0) & (row < rows), length, 0)
    tokens = req_to_token + row * context
    copy_run(out_cache_loc, target, size, tokens, start, context, length)


def launch_assign_extend_cache_locs(given: Any) -> None:
    """Launch ``assign_extend_cache_locs``."""
    rows, context = given.req_to_token.shape
    launch(
        assign_extend_cache_locs_kernel, (given.req_pool_indices.numel(),), given,
        rows=rows, context=context, size=given.out_cache_loc.numel(),
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "size", "drafts"])
def assign_draft_cache_locs_contiguous_kernel(
    req_pool_indices, req_to_token, seq_lens, out_cache_loc, rows, context, size, drafts
):
    """One program per request."""
    request = tl.program_id(0).to(tl.int64)
    row = tl.load(req_pool_indices + request).to(tl.int64)
    length = tl.where((row >= 0) & (row < rows), drafts, 0)
    tokens, seq_len = req_to_token + row * context, tl.load(seq_lens + request)
    copy_run(out_cache_loc, request * drafts, size, tokens, seq_len, context, length)


def launch_assign_draft_cache_locs_contiguous(given: Any) -> None:
    """Launch ``assign_draft_cache_locs_contiguous``."""
    rows, context = given.req_to_token.shape
    launch(
        assign_draft_cache_locs_contiguous_kernel, (given.req_pool_indices.numel(),), given,
        rows=rows, context=context, size=given.out_cache_loc.numel(),
        drafts=given.topk * given.num_steps,
    )  # fmt: skip
