"""Draft tokens' slots for CUDA. Contract: ``graphkit.ops.draft_cache_locs``.

Two kernels: one fills ``req_to_token`` from all of ``out_cache_loc``, the other overwrites the
front of ``out_cache_loc`` from ``req_to_token``. In one kernel, a request would overwrite slots
that another has still to read.
"""

import torch
import triton
import triton.language as tl

from graphkit.ops.kernels.packed import copy_run, total_before


@triton.jit(do_not_specialize=["rows", "slots", "drafts"])
def enter_kernel(
    req_pool_indices, req_to_token, seq_lens, out_cache_loc, extend_lens,
    rows, context, slots, drafts,
):  # fmt: skip
    """One program per request."""
    request = tl.program_id(0).to(tl.int64)
    if extend_lens is None:
        begin, length = request * drafts, drafts
    else:
        begin, length = total_before(extend_lens, request, 0), tl.load(extend_lens + request)
    row = tl.load(req_pool_indices + request).to(tl.int64)
    length = tl.where((row >= 0) & (row < rows), length, 0)
    tokens, seq_len = req_to_token + row * context, tl.load(seq_lens + request)
    copy_run(tokens, seq_len, context, out_cache_loc, begin, slots, length)


def launch_enter(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
    extend_lens: torch.Tensor | None,
    drafts: int,
) -> None:
    """Write ``extend_lens`` slots, or ``drafts`` of every request, behind its committed tokens."""
    if requests := seq_lens.numel():
        enter_kernel[(requests,)](
            req_pool_indices.contiguous(), req_to_token, seq_lens.contiguous(), out_cache_loc,
            None if extend_lens is None else extend_lens.contiguous(),
            *req_to_token.shape, out_cache_loc.numel(), drafts,
        )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "slots", "pairs"])
def branch_kernel(
    req_pool_indices, req_to_token, seq_lens, out_cache_loc, num_new_pages_per_topk,
    last_page_lens_cumsum, source_cache_loc, target_cache_loc,
    rows, context, slots, pairs, topk, num_steps, page_size,
):  # fmt: skip
    """One program per request and branch."""
    request = tl.program_id(0).to(tl.int64)
    branch = tl.program_id(1)
    row = tl.load(req_pool_indices + request).to(tl.int64)
    is_row = (row >= 0) & (row < rows)
    tokens, seq_len = req_to_token + row * context, tl.load(seq_lens + request)
    shift = branch * tl.load(num_new_pages_per_topk + request) * page_size

    place = (request * topk + branch) * num_steps
    steps = tl.where(is_row, num_steps, 0)
    copy_run(out_cache_loc, place, slots, tokens, seq_len + shift, context, steps)

    before = tl.load(last_page_lens_cumsum + request - 1, mask=request > 0, other=0)
    tail = tl.load(last_page_lens_cumsum + request) - before
    copied = tl.where(is_row & (branch > 0), tail, 0)
    place = before.to(tl.int64) * (topk - 1) + (branch - 1) * tail
    page = seq_len - tail
    copy_run(source_cache_loc, place, pairs, tokens, page, context, copied)
    copy_run(target_cache_loc, place, pairs, tokens, page + shift, context, copied)


def launch_branch(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
    num_new_pages_per_topk: torch.Tensor,
    last_page_lens_cumsum: torch.Tensor,
    source_cache_loc: torch.Tensor,
    target_cache_loc: torch.Tensor,
    topk: int,
    num_steps: int,
    page_size: int,
) -> None:
    """Read the draft tokens' slots, and the pairs to copy, back from the table."""
    if requests := seq_lens.numel():
        branch_kernel[(requests, topk)](
            req_pool_indices.contiguous(), req_to_token, seq_lens.contiguous(), out_cache_loc,
            num_new_pages_per_topk.contiguous(), last_page_lens_cumsum.contiguous(),
            source_cache_loc, target_cache_loc, *req_to_token.shape, out_cache_loc.numel(),
            source_cache_loc.numel(), topk, num_steps, page_size,
        )  # fmt: skip
