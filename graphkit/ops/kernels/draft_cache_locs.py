"""Draft tokens' slots for CUDA. Contract: ``graphkit.ops.draft_cache_locs``.

Two kernels: one fills ``req_to_token`` from all of ``out_cache_loc``, the other overwrites the
front of ``out_cache_loc`` from ``req_to_token``. In a single kernel, a request would overwrite
slots that a later one still has to read.
"""

from typing import Any

import triton
import triton.language as tl

from graphkit.ops.kernels.launch import launch
from graphkit.ops.kernels.packed import copy_run, total_before


@triton.jit(do_not_specialize=["rows", "slots", "drafts"])
def enter_slots_kernel(
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


@triton.jit(do_not_specialize=["rows", "slots", "pairs"])
def read_branches_kernel(
    req_pool_indices, req_to_token, seq_lens, out_cache_loc, num_new_pages_per_topk,
    last_page_lens_cumsum, source_cache_loc, target_cache_loc,
    rows, context, slots, pairs, topk, speculative_num_steps, page_size,
):  # fmt: skip
    """One program per request and branch."""
    request = tl.program_id(0).to(tl.int64)
    branch = tl.program_id(1)
    row = tl.load(req_pool_indices + request).to(tl.int64)
    is_row = (row >= 0) & (row < rows)
    tokens, seq_len = req_to_token + row * context, tl.load(seq_lens + request)
    shift = branch * tl.load(num_new_pages_per_topk + request) * page_size

    start = (request * topk + branch) * speculative_num_steps
    steps = tl.where(is_row, speculative_num_steps, 0)
    copy_run(out_cache_loc, start, slots, tokens, seq_len + shift, context, steps)

    before = tl.load(last_page_lens_cumsum + request - 1, mask=request > 0, other=0)
    tail = tl.load(last_page_lens_cumsum + request) - before
    copied = tl.where(is_row & (branch > 0), tail, 0)
    start = before.to(tl.int64) * (topk - 1) + (branch - 1) * tail
    page = seq_len - tail
    copy_run(source_cache_loc, start, pairs, tokens, page, context, copied)
    copy_run(target_cache_loc, start, pairs, tokens, page + shift, context, copied)


def launch_assign_draft_cache_locs(given: Any) -> None:
    """Launch ``assign_draft_cache_locs``."""
    requests, topk, steps = given.seq_lens.numel(), given.topk, given.speculative_num_steps
    rows, context = given.req_to_token.shape
    has_pages = given.page_size > 1 and topk > 1
    launch(
        enter_slots_kernel, (requests,), given, rows=rows, context=context,
        extend_lens=given.extend_lens.contiguous() if has_pages else None,
        slots=given.out_cache_loc.numel(), drafts=topk * steps,
    )  # fmt: skip
    if has_pages:
        launch(
            read_branches_kernel, (requests, topk), given, rows=rows, context=context,
            slots=requests * topk * steps, pairs=given.duplicate_cache_len,
        )  # fmt: skip
