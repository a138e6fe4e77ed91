"""Scores of index keys for CUDA. Contract: ``graphkit.ops.index_scores``.

One program loads and dequantises a block of one request's keys and scores it for each of the
request's rows. The launcher fills the scores with -inf; the kernel writes them for visible keys.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from graphkit.ops.kernels.launch import launch


@triton.jit
def _slots_of_keys(page, key, PAGE_SIZE: tl.constexpr):
    """Return the slots, int64, of keys in pages.

    Triton 3.6.0 takes the sum to be divisible by the page size at every key, and loads 16 bytes at
    once where rows of the cache are less aligned. ``multiple_of`` replaces what it derives.
    """
    return tl.multiple_of(page.to(tl.int64) * PAGE_SIZE + key % PAGE_SIZE, 1)


@triton.jit(do_not_specialize=["tokens", "max_keys", "max_pages", "width"])
def index_scores_kernel(
    scores, query_TXI, weights_TX, index_cache, scale_bytes, page_table, cache_seqlens_B,
    cu_seqlens_q_B1, mask, tokens, max_keys, max_pages, width,
    PAGE_SIZE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    MASK_COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_X: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program per request and block of keys."""
    request = tl.program_id(0).to(tl.int64)
    key = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    length = tl.minimum(tl.load(cache_seqlens_B + request), max_keys)
    if MASK_COLUMNS:
        begin, end = request * width, tokens
    else:
        begin = tl.maximum(tl.load(cu_seqlens_q_B1 + request), 0)
        end = tl.minimum(tl.load(cu_seqlens_q_B1 + request + 1), tokens)
    rows = tl.minimum(end - begin, width)
    prefix = tl.load(cache_seqlens_B + request) - (MASK_COLUMNS if MASK_COLUMNS else rows)
    is_key = key < length
    rows = tl.where(tl.program_id(1) * BLOCK_N < length, rows, 0)

    page = tl.load(page_table + request * max_pages + key // PAGE_SIZE, mask=is_key, other=0)
    slot = _slots_of_keys(page, key, PAGE_SIZE)
    element, head = tl.arange(0, BLOCK_I), tl.arange(0, BLOCK_X)
    is_element, is_head = element < DIM, head < HEADS
    cells = index_cache + slot[None, :] * (DIM + 4) + element[:, None]
    k = tl.load(cells, mask=is_element[:, None] & is_key[None, :], other=0.0).to(tl.float32)
    bits = tl.zeros([BLOCK_N], tl.uint32)
    for byte in tl.static_range(4):
        part = tl.load(scale_bytes + slot * (DIM + 4) + DIM + byte, mask=is_key, other=0)
        bits |= part.to(tl.uint32) << (8 * byte)
    scale = bits.to(tl.float32, bitcast=True)
    own_key = key - prefix
    for row in range(rows):
        token = begin + row
        heads = token * HEADS + head
        queries = query_TXI + heads[:, None] * DIM + element[None, :]
        q = tl.load(queries, mask=is_head[:, None] & is_element[None, :], other=0.0)
        products = tl.dot(q, k.to(q.dtype), input_precision=PRECISION) * scale[None, :]
        weight = tl.load(weights_TX + heads, mask=is_head, other=0.0).to(tl.float32)
        # Not a product with 0: a hidden key may be NaN, but is not stored.
        score = tl.sum(tl.maximum(products, 0.0) * weight[:, None], 0)
        if MASK_COLUMNS:
            columns = mask + (request * width + row) * MASK_COLUMNS + own_key
            tree = tl.load(columns, mask=is_key & (own_key >= 0), other=1) != 0
            visible = is_key & tree
        else:
            visible = is_key & (own_key <= row)
        tl.store(scores + token.to(tl.int64) * max_keys + key, score, mask=visible)


def launch_index_scores(args: Any, scores: torch.Tensor) -> None:
    """Launch ``index_scores``."""
    scores.fill_(-torch.inf)
    (tokens, heads, dim), (requests, max_pages) = args.query_TXI.shape, args.page_table.shape
    max_keys, block = max_pages * args.page_size, 64
    if tokens == 0:
        return
    cache, mask = args.index_cache.contiguous(), args.mask
    launch(
        index_scores_kernel, (requests, triton.cdiv(max_keys, block)), args,
        scores=scores, index_cache=cache.view(torch.float8_e4m3fn), scale_bytes=cache,
        mask=None if mask is None else mask.contiguous().view(torch.uint8),
        tokens=tokens, max_keys=max_keys, max_pages=max_pages, width=args.max_seqlen_q,
        PAGE_SIZE=args.page_size, HEADS=heads, DIM=dim,
        MASK_COLUMNS=0 if mask is None else mask.shape[2],
        PRECISION="ieee" if args.query_TXI.dtype == torch.float32 else "tf32",
        BLOCK_X=max(16, triton.next_power_of_2(heads)),
        BLOCK_I=max(16, triton.next_power_of_2(dim)), BLOCK_N=block, num_warps=4,
    )  # fmt: skip
