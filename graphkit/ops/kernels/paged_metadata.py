"""Attention metadata for CUDA. Contract: ``graphkit.ops.paged_metadata``."""

from typing import Any

import triton
import triton.language as tl

from graphkit.ops.kernels.launch import KEPT_IN_L2, launch, wait_for_kernel_before
from graphkit.ops.paged_metadata import Metadata


@triton.jit(do_not_specialize=["requests", "rows", "row_blocks", "tokens_per_request", "appended"])
def paged_metadata_kernel(
    req_pool_indices_B, seq_lens_B, req_to_token, extend_lens_B,
    cache_seqlens, cu_seqlens_q, cu_seqlens_k, page_table,
    requests, rows, context, row_stride, max_pages, row_blocks, tokens_per_request, appended,
    PAGE_SIZE: tl.constexpr, RAGGED: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_P: tl.constexpr,
    STARTS_EARLY: tl.constexpr,
):  # fmt: skip
    """Program 0 writes lengths and sums; each of the others BLOCK_P entries of the page table."""
    wait_for_kernel_before(STARTS_EARLY)
    program = tl.program_id(0)
    if program == 0:
        each = tl.arange(0, BLOCK_B)
        is_live = each < requests
        lengths = tl.load(seq_lens_B + each, mask=is_live, other=0, eviction_policy=KEPT_IN_L2)
        lengths = tl.where(is_live, lengths + appended, 0)
        tl.store(cache_seqlens + each, lengths, mask=is_live)
        tl.store(cu_seqlens_k + 1 + each, tl.cumsum(lengths, 0), mask=is_live)
        if RAGGED:
            ends = tl.cumsum(tl.load(extend_lens_B + each, mask=is_live, other=0), 0)
        else:
            ends = (each + 1) * tokens_per_request
        tl.store(cu_seqlens_q + 1 + each, ends, mask=is_live)
        tl.store(cu_seqlens_k, 0)
        tl.store(cu_seqlens_q, 0)
    else:
        request = (program - 1) // row_blocks
        page = (program - 1) % row_blocks * BLOCK_P + tl.arange(0, BLOCK_P)
        length = tl.load(seq_lens_B + request, eviction_policy=KEPT_IN_L2) + appended
        row = tl.load(req_pool_indices_B + request, eviction_policy=KEPT_IN_L2)
        row = tl.minimum(tl.maximum(row, 0), rows - 1)
        first = page * PAGE_SIZE
        begun = (page < max_pages) & (first < length) & (first < context)
        slots = req_to_token + row * row_stride + first
        slot = tl.load(slots, mask=begun, other=0, eviction_policy=KEPT_IN_L2)
        entry = page_table + request.to(tl.int64) * max_pages + page
        tl.store(entry, slot // PAGE_SIZE, mask=page < max_pages)


def launch_paged_metadata(args: Any, metadata: Metadata) -> None:
    """Launch ``paged_metadata``."""
    cache_seqlens, cu_seqlens_q, cu_seqlens_k, page_table = metadata
    requests, max_pages = page_table.shape
    block = min(1024, triton.next_power_of_2(max_pages))
    row_blocks = triton.cdiv(max_pages, block)
    table = args.req_to_token
    table = table if table.stride(1) == 1 else table.contiguous()
    launch(
        paged_metadata_kernel, (1 + requests * row_blocks,), args,
        req_to_token=table, cache_seqlens=cache_seqlens, cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k, page_table=page_table,
        requests=requests, rows=table.shape[0], context=table.shape[1],
        row_stride=table.stride(0), row_blocks=row_blocks,
        PAGE_SIZE=args.page_size, RAGGED=args.extend_lens_B is not None,
        BLOCK_B=max(16, triton.next_power_of_2(requests)), BLOCK_P=block,
    )  # fmt: skip
