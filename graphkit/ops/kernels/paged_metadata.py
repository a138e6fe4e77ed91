"""Attention metadata for CUDA. Contract: ``graphkit.ops.paged_metadata``."""

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["requests", "rows", "row_blocks", "tokens_per_request", "appended"])
def paged_metadata_kernel(
    req_pool_indices, seq_lens, req_to_token, extend_lens,
    cache_seqlens, cu_seqlens_q, cu_seqlens_k, page_table,
    requests, rows, context, row_stride, max_pages, row_blocks, tokens_per_request, appended,
    PAGE_SIZE: tl.constexpr, VARIES: tl.constexpr, BLOCK_B: tl.constexpr,
    BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Program 0 writes all that is per request; the others write BLOCK_P page-table entries."""
    program = tl.program_id(0)
    if program == 0:
        each = tl.arange(0, BLOCK_B)
        is_live = each < requests
        lengths = tl.load(seq_lens + each, mask=is_live, other=0) + appended
        lengths = tl.where(is_live, lengths, 0)
        tl.store(cache_seqlens + each, lengths, mask=is_live)
        tl.store(cu_seqlens_k + 1 + each, tl.cumsum(lengths, 0), mask=is_live)
        if VARIES:
            ends = tl.cumsum(tl.load(extend_lens + each, mask=is_live, other=0), 0)
        else:
            ends = (each + 1) * tokens_per_request
        tl.store(cu_seqlens_q + 1 + each, ends, mask=is_live)
        tl.store(cu_seqlens_k, 0)
        tl.store(cu_seqlens_q, 0)
    else:
        request = (program - 1) // row_blocks
        page = (program - 1) % row_blocks * BLOCK_P + tl.arange(0, BLOCK_P)
        length = tl.load(seq_lens + request) + appended
        row = tl.load(req_pool_indices + request)
        row = tl.minimum(tl.maximum(row, 0), rows - 1)
        first = page * PAGE_SIZE
        begun = (page < max_pages) & (first < length) & (first < context)
        slot = tl.load(req_to_token + row * row_stride + first, mask=begun, other=0)
        entry = page_table + request.to(tl.int64) * max_pages + page
        tl.store(entry, slot // PAGE_SIZE, mask=page < max_pages)


def launch_paged_metadata(
    req_pool_indices_B: torch.Tensor,
    seq_lens_B: torch.Tensor,
    req_to_token: torch.Tensor,
    page_size: int,
    max_pages: int,
    tokens_per_request: int,
    appended: int,
    extend_lens_B: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launch on the current stream; as ``graphkit.ops.paged_metadata.paged_metadata``."""
    requests = seq_lens_B.shape[0]
    lengths = seq_lens_B.new_empty(requests)
    cu_q, cu_k = seq_lens_B.new_empty(requests + 1), seq_lens_B.new_empty(requests + 1)
    pages = seq_lens_B.new_empty(requests, max_pages)
    block = min(1024, triton.next_power_of_2(max_pages))
    row_blocks = triton.cdiv(max_pages, block)
    table = req_to_token if req_to_token.stride(1) == 1 else req_to_token.contiguous()
    paged_metadata_kernel[(1 + requests * row_blocks,)](
        req_pool_indices_B.contiguous(), seq_lens_B.contiguous(), table,
        None if extend_lens_B is None else extend_lens_B.contiguous(), lengths, cu_q, cu_k, pages,
        requests, table.shape[0], table.shape[1], table.stride(0), max_pages, row_blocks,
        tokens_per_request, appended,
        PAGE_SIZE=page_size, VARIES=extend_lens_B is not None,
        BLOCK_B=max(16, triton.next_power_of_2(requests)), BLOCK_P=block,
    )  # fmt: skip
    return lengths, cu_q, cu_k, pages
