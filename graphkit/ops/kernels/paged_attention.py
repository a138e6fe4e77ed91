"""Paged attention for CUDA. Contract: ``graphkit.ops.paged_attention``."""

import math
from dataclasses import replace
from typing import Any

import torch
import triton

from graphkit.ops.attention_layout import is_part_of
from graphkit.ops.kernels.attention_config import (
    LARGE_KEYS,
    LEAST_SEGMENT,
    MAX_SPLITS,
    PROMPT_ROWS,
    AttentionConfig,
    choose_config,
    choose_fast_config,
    choose_splits,
    count_segments,
    spread_rows,
)
from graphkit.ops.kernels.attention_joins import (
    join_paths_kernel,
    join_segments_kernel,
    join_splits_kernel,
)
from graphkit.ops.kernels.attention_segments import LOG2_E
from graphkit.ops.kernels.devices import has_float8_cvt, has_warpgroups, multiprocessors
from graphkit.ops.kernels.launch import launch
from graphkit.ops.kernels.paged_attention_kernel import paged_attention_kernel
from graphkit.ops.kernels.prompt_attention import ROWS, prompt_attention_kernel
from graphkit.ops.kv_cache import FP8

EARLY_KEYS, EARLY_FP8_KEYS = 4, 8
"""Least keys of a block per query row with which a program requests keys before it waits. Such a
program loads its rows again for each block, and over float8 also converts them."""
ALIGNED = 16
"""Divisor of addresses and strides that Triton specialises a kernel for."""
JOINED_SUMS = 8
"""Segments whose sums a program that joins them has in flight."""
JOINED_ROWS = 4
"""Rows of a program that joins splits, if each multiprocessor then has a program; otherwise 1."""
NODE_ROWS = 16
"""Query heads of a program that attends over the path of a node, the least of a product."""


def join_segments(args: Any, out: torch.Tensor, segments: dict[str, torch.Tensor]) -> None:
    """Write the attended values of rows whose segments the kernel before has stored.

    Args:
        args: Arguments of the op.
        out: Result, [T, N, E].
        segments: ``segment_acc``, float32 [G, T, N, E], sums of the values of each segment by
            weights relative to ``segment_top``, float32 [G, T, N]; ``segment_total``, float32
            [G, T, N], sums of the weights; ``segment_count``, int32 [T, N].
    """
    tokens, heads, value_dim = out.shape
    rows = tokens * heads
    are_many = rows >= JOINED_ROWS * multiprocessors(out.device)[0]
    block, block_rows = 64 if are_many else 32, 1
    kernel: Any = join_segments_kernel
    options: dict[str, Any] = {"BATCH": JOINED_SUMS, "enable_fp_fusion": False}
    if not args.row_invariant:
        kernel, splits = join_splits_kernel, len(segments["segment_acc"])
        options = {"splits": splits, "BLOCK_S": triton.next_power_of_2(splits)}
        # A warp has 2048 numbers, or 512 if there are few rows: each program then ends sooner.
        block = min(128, max(32, (2048 if are_many else 512) // options["BLOCK_S"]))
        block_rows = JOINED_ROWS if are_many else 1
    block = min(block, triton.next_power_of_2(value_dim))
    launch(
        kernel, (triton.cdiv(rows, block_rows), triton.cdiv(value_dim, block)), args, out=out,
        sinks=args.sinks_N, rows=rows, HEADS=heads, GROUP=heads // args.value_cache.shape[1],
        VALUE_DIM=value_dim, BLOCK_M=block_rows, BLOCK_E=block, num_warps=block_rows, **options,
        **segments,
    )  # fmt: skip


def join_paths(args: Any, parameters: dict[str, Any]) -> None:
    """Write the attended values of the nodes of trees, of which the kernel before has stored sums.

    Args:
        args: Arguments of the op.
        parameters: Those of the kernel before.
    """
    grid = parameters["tokens"] * triton.cdiv(parameters["GROUP"], NODE_ROWS)
    # Without splits, the sums of all whole segments have the sink.
    sinks = parameters["sinks"] if parameters["IS_SPLIT"] else None
    own = parameters | {"sinks": sinks, "BLOCK_M": NODE_ROWS}
    names = join_paths_kernel.arg_names
    launch(
        join_paths_kernel, (grid, args.key_cache.shape[1]), args, num_warps=8,
        num_stages=1 if own["SHARED"] else 2,  # latents in flight would take too many registers
        enable_fp_fusion=False, **{name: value for name, value in own.items() if name in names},
    )  # fmt: skip


def _is_paired(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Return whether the caches are of float8_e4m3fn and can be read as words of two elements.

    They cannot if values are parts of keys, or if a key may start within a word.
    """
    is_float8 = query.element_size() == 2 and key.dtype == value.dtype == FP8
    if not is_float8 or key.shape != value.shape or is_part_of(value, key):
        return False
    return all(
        size % 2 == 0
        for cache in (key, value)
        for size in (cache.storage_offset(), cache.shape[2], *cache.stride()[:2])
    )


def _requests_keys_early(
    config: AttentionConfig, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> bool:
    """Return whether programs request their first keys before they wait for the kernel before.

    Rows and keys have to be aligned, so that Triton copies 16 bytes at a time. Only such copies are
    requested ahead of the loop and bypass the L1 cache, which may hold older keys before the wait.
    """
    if query.element_size() != 2 or key.shape != value.shape or is_part_of(value, key):
        return False
    keys_per_row = EARLY_FP8_KEYS if key.dtype == torch.int16 else EARLY_KEYS
    if config.block_keys < keys_per_row * config.block_rows:
        return False
    return _are_aligned(query, key, value)


def _are_aligned(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Return whether rows and keys are aligned."""
    strides = [stride for rows in (query, key, value) for stride in rows.stride()[:2]]
    addresses = [rows.data_ptr() for rows in (query, key, value)]
    return all(number % ALIGNED == 0 for number in (key.shape[2], *strides, *addresses))


def _suits_warpgroups(args: Any, query: torch.Tensor) -> bool:
    """Return whether ``prompt_attention_kernel`` takes the arguments of the op."""
    key, value, width = args.key_cache, args.value_cache, args.max_seqlen_q
    if not has_warpgroups(query.device) or args.mask is not None or args.window or args.softcap:
        return False
    if key.shape != value.shape or key.shape[2] not in (64, 128) or is_part_of(value, key):
        return False
    if not (query.dtype == key.dtype == value.dtype and query.element_size() == 2):
        return False
    has_rows = width * (query.shape[1] // key.shape[1]) >= PROMPT_ROWS
    has_scales = args.key_scale_M is not None or args.value_scale_M is not None
    return has_rows and not has_scales and _are_aligned(query, key, value)


def _launch_prompt_attention(args: Any, out: torch.Tensor, query: torch.Tensor) -> None:
    """Launch ``prompt_attention_kernel``, which joins segments itself."""
    key, value = args.key_cache, args.value_cache
    (tokens, heads, dim), kv_heads = query.shape, key.shape[1]
    requests, max_pages = args.page_table.shape
    # Each request has at most one tile that is not full, and so do rows of no request.
    tiles = triton.cdiv(tokens * heads // kv_heads, 2 * ROWS.value) + requests
    launch(
        prompt_attention_kernel, (tiles * kv_heads,), args, out=out, query=query, key_cache=key,
        value_cache=value, sinks=args.sinks_N, query_token_stride=query.stride(0),
        query_head_stride=query.stride(1), tokens=tokens, max_keys=max_pages * args.page_size,
        max_pages=max_pages, requests=requests, scale_log2=args.scale * LOG2_E.value,
        KEY_SLOT_STRIDE=key.stride(0), KEY_HEAD_STRIDE=key.stride(1),
        VALUE_SLOT_STRIDE=value.stride(0), VALUE_HEAD_STRIDE=value.stride(1),
        PAGE_SIZE=args.page_size, HEADS=heads, GROUP=heads // kv_heads, DIM=dim,
        BLOCK_B=triton.next_power_of_2(requests + 1), num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def launch_paged_attention(
    args: Any, out: torch.Tensor, splits: int | None = None, config: AttentionConfig | None = None
) -> None:
    """Launch ``paged_attention``, with ``choose_splits`` and ``choose_config`` by default."""
    query = args.query_TND if args.query_TND.stride(2) == 1 else args.query_TND.contiguous()
    key, value, mask, width = args.key_cache, args.value_cache, args.mask, args.max_seqlen_q
    (tokens, heads, key_dim), value_dim = query.shape, value.shape[2]
    requests, max_pages = args.page_table.shape
    if tokens == 0 or max_pages == 0 or requests == 0:
        out.zero_()
        return
    kv_heads, max_keys = key.shape[1], max_pages * args.page_size
    group = heads // kv_heads
    is_paired = _is_paired(query, key, value)
    if is_paired:
        key, value = key.view(torch.int16), value.view(torch.int16)
    is_shared = is_part_of(value, key)
    element_size = 1 if is_paired else query.element_size()
    processors, shared_bytes = multiprocessors(query.device)
    choose = choose_config if args.row_invariant else choose_fast_config
    chosen = config or choose(
        width * group, key_dim, value_dim, element_size, is_shared, shared_bytes
    )
    key_heads = max(requests, triton.cdiv(tokens, width)) * kv_heads  # of all requests
    tiles = key_heads * triton.cdiv(width * group, chosen.block_rows)
    if splits is None:
        seen_keys = min(max_keys, args.window + width) if args.window else max_keys
        most = count_segments(seen_keys)
        if not args.row_invariant:
            most = min(seen_keys // chosen.least_split, MAX_SPLITS)
        splits = choose_splits(tiles, most, chosen.programs * processors)
    # The other kernel may split keys to fill the last round of its programs, at a lower speed.
    is_full = tokens * heads >= ROWS.value * processors  # half of the multiprocessors have a tile
    if config is None and (splits == 1 or is_full) and _suits_warpgroups(args, query):
        _launch_prompt_attention(args, out, query)
        return
    if config is None:
        chosen = spread_rows(chosen, tiles * splits, processors)
        if splits > 1:  # with stored sums, 128 rows exceed the shared memory of sm_90
            chosen = replace(chosen, block_rows=min(64, chosen.block_rows))
    row_tiles = triton.cdiv(width * group, chosen.block_rows)
    segments = {"segment_acc": out, "segment_top": out, "segment_total": out, "segment_count": out}
    columns = 0 if mask is None else mask.shape[2]
    has_paths = columns > 0 and args.row_invariant
    if splits > 1 or has_paths:
        count = 2
        if splits > 1 and not args.row_invariant:
            count = splits
        elif splits > 1:
            count = count_segments(max_keys)
            spread = args.window + max(width, columns)
            if args.window:
                count = min(count, triton.cdiv(spread, LEAST_SEGMENT) + 2)
        sums = query.new_empty((count, *out.shape), dtype=torch.float32)
        tops = query.new_empty((2, count, tokens, heads), dtype=torch.float32)
        counts = query.new_empty((tokens, heads), dtype=torch.int32)
        segments = dict(zip(segments, (sums, *tops, counts), strict=True))
    read_early = (
        args.page_table, args.cache_seqlens_B, args.cu_seqlens_q_B1, mask, args.key_scale_M,
    )  # fmt: skip
    # The launch copies tensors that are not contiguous. A copy is newer than the store.
    follows_store = args.follows_store and all(
        tensor is None or tensor.is_contiguous() for tensor in read_early
    )
    parameters = {
        "out": out, "sinks": args.sinks_N, "query": query, "key_cache": key, "value_cache": value,
        "mask": None if mask is None else mask.contiguous().view(torch.uint8),
        "query_token_stride": query.stride(0), "query_head_stride": query.stride(1),
        "tokens": tokens, "max_keys": max_keys, "max_pages": max_pages, "requests": requests,
        "scale_log2": args.scale / args.softcap if args.softcap else args.scale * LOG2_E.value,
        "cap_log2": args.softcap * LOG2_E.value,
        "KEY_SLOT_STRIDE": key.stride(0), "KEY_HEAD_STRIDE": key.stride(1),
        "VALUE_SLOT_STRIDE": value.stride(0), "VALUE_HEAD_STRIDE": value.stride(1),
        "PAGE_SIZE": args.page_size, "HEADS": heads, "GROUP": group,
        "VALUE_DIM": value_dim, "REST_DIM": key_dim - value_dim, "SHARED": is_shared,
        "MASK_ROWS": width if columns else 0, "MASK_COLUMNS": columns,
        "BLOCK_C": triton.next_power_of_2(max(columns, 1)), "WINDOW": args.window,
        "CHUNKED": args.chunked, "HAS_CAP": args.softcap > 0, "IS_SPLIT": splits > 1,
        "IS_SEGMENTED": args.row_invariant,
        "PRECISION": "ieee" if query.dtype == torch.float32 else "tf32",
        "BLOCK_N": chosen.block_keys,
        "BLOCK_E": max(32 if is_paired else 16, triton.next_power_of_2(value_dim)),
        "BLOCK_R": max(16, triton.next_power_of_2(key_dim - value_dim)),
        "HAS_FLOAT8_CVT": has_float8_cvt(query.device), **segments,
    }  # fmt: skip
    launch(
        paged_attention_kernel, (key_heads * row_tiles, splits), args, **parameters,
        row_tiles=row_tiles, width=width, splits=splits, BLOCK_M=chosen.block_rows,
        RUN=1 if chosen.block_keys >= LARGE_KEYS else math.gcd(args.page_size, chosen.block_keys),
        FOLLOWS_STORE=follows_store,
        HAS_EARLY_KEYS=follows_store and _requests_keys_early(chosen, query, key, value),
        num_warps=chosen.num_warps, num_stages=chosen.num_stages, enable_fp_fusion=False,
    )  # fmt: skip
    if has_paths:
        join_paths(args, parameters)
    elif splits > 1:
        join_segments(args, out, segments)
