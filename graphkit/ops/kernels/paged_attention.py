"""Paged attention for CUDA. Contract: ``graphkit.ops.paged_attention``."""

import math
from typing import Any

import torch
import triton

from graphkit.ops.attention_layout import is_part_of
from graphkit.ops.kernels.attention_config import AttentionConfig, choose_config, choose_splits
from graphkit.ops.kernels.join_splits import join_splits
from graphkit.ops.kernels.launch import launch
from graphkit.ops.kernels.paged_attention_kernel import LOG2_E, paged_attention_kernel


def launch_paged_attention(
    given: Any, splits: int | None = None, config: AttentionConfig | None = None
) -> torch.Tensor:
    """Launch ``paged_attention``, with ``choose_splits`` and ``choose_config`` by default."""
    query = given.query_TND if given.query_TND.stride(2) == 1 else given.query_TND.contiguous()
    key, value, mask, width = given.key_cache, given.value_cache, given.mask, given.max_seqlen_q
    (tokens, heads, key_dim), value_dim = query.shape, value.shape[2]
    requests, max_pages = given.page_table.shape
    out: torch.Tensor = query.new_empty((tokens, heads, value_dim))
    if tokens == 0 or max_pages == 0 or requests == 0:
        return out.zero_()
    kv_heads, max_keys = key.shape[1], max_pages * given.page_size
    group = heads // kv_heads
    config = config or choose_config(width * group, key_dim, value_dim, query.element_size())
    row_tiles = triton.cdiv(width * group, config.block_rows)
    tiles = max(requests, triton.cdiv(tokens, width)) * row_tiles
    if splits is None:
        processors = torch.cuda.get_device_properties(query.device).multi_processor_count
        seen_keys = min(max_keys, given.window + width) if given.window else max_keys
        splits = choose_splits(tiles * kv_heads, seen_keys, config.programs * processors)
    partial, lse = out, out
    if splits > 1:
        partial = query.new_empty((splits, *out.shape), dtype=torch.float32)
        lse = query.new_empty((splits, tokens, heads), dtype=torch.float32)
    columns = 0 if mask is None else mask.shape[2]
    launch(
        paged_attention_kernel, (tiles * kv_heads, splits), given,
        out=partial, lse=lse, sinks=given.sinks_N, query=query, key_cache=key, value_cache=value,
        mask=None if mask is None else mask.contiguous().view(torch.uint8),
        out_split_stride=out.numel(),
        query_token_stride=query.stride(0), query_head_stride=query.stride(1),
        tokens=tokens, max_keys=max_keys, max_pages=max_pages, requests=requests,
        row_tiles=row_tiles, width=width, splits=splits,
        scale_log2=given.scale / given.softcap if given.softcap else given.scale * LOG2_E.value,
        cap_log2=given.softcap * LOG2_E.value,
        KEY_SLOT_STRIDE=key.stride(0), KEY_HEAD_STRIDE=key.stride(1),
        VALUE_SLOT_STRIDE=value.stride(0), VALUE_HEAD_STRIDE=value.stride(1),
        PAGE_SIZE=given.page_size, HEADS=heads, GROUP=group,
        VALUE_DIM=value_dim, REST_DIM=key_dim - value_dim, SHARED=is_part_of(value, key),
        MASK_ROWS=width if columns else 0, MASK_COLUMNS=columns,
        BLOCK_C=triton.next_power_of_2(max(columns, 1)), WINDOW=given.window,
        HAS_CAP=given.softcap > 0, IS_SPLIT=splits > 1,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        BLOCK_M=config.block_rows, BLOCK_N=config.block_keys,
        RUN=math.gcd(given.page_size, config.block_keys),
        BLOCK_E=max(16, triton.next_power_of_2(value_dim)),
        BLOCK_R=max(16, triton.next_power_of_2(key_dim - value_dim)),
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    if splits > 1:
        join_splits(given, out, partial, lse)
    return out
