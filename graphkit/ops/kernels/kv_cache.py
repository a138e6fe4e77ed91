"""Rows of a KV cache for CUDA. Contracts: ``graphkit.ops.kv_cache``."""

from math import gcd
from typing import Any

import torch
import triton
import triton.language as tl

from graphkit.ops.attention_layout import has_dense_rows
from graphkit.ops.kernels.devices import check_float8
from graphkit.ops.kernels.launch import launch, wait_for_kernel_before, wait_then_start_next
from graphkit.ops.kv_cache import FP8

WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
"""Dtypes to move rows as, by bytes."""


@triton.jit
def scaled(row, scale_M, head, is_inside):
    """Return elements divided by the scale of their head, float32, limited to float8's range."""
    wide = row.to(tl.float32)
    if scale_M is not None:
        wide = wide / tl.load(scale_M + head, mask=is_inside, other=1.0)
    return tl.minimum(tl.maximum(wide, -448.0), 448.0)


@triton.jit(do_not_specialize_on_alignment=["loc_T"])
def store_kv_kernel(
    key_cache, value_cache, loc_T, key, value, key_scale_M, value_scale_M, slots, key_stride,
    value_stride, HEADS: tl.constexpr, KEY_ROW: tl.constexpr, VALUE_ROW: tl.constexpr,
    KEY_SLOT: tl.constexpr, VALUE_SLOT: tl.constexpr, BLOCK: tl.constexpr, IS_FP8: tl.constexpr,
    STARTS_EARLY: tl.constexpr,
):  # fmt: skip
    """One program per token and BLOCK of its M * D elements; slots are KEY_SLOT elements apart."""
    wait_then_start_next(STARTS_EARLY)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(loc_T + token)
    inside = (slot >= 0) & (slot < slots)
    is_key = inside & (column < KEY_ROW)
    is_value = inside & (column < VALUE_ROW)
    new_key = tl.load(key + token * key_stride + column, mask=is_key)
    new_value = tl.load(value + token * value_stride + column, mask=is_value)
    keys = key_cache + slot * KEY_SLOT + column
    values = value_cache + slot * VALUE_SLOT + column
    if IS_FP8:
        new_key = scaled(new_key, key_scale_M, column // (KEY_ROW // HEADS), is_key)
        new_value = scaled(new_value, value_scale_M, column // (VALUE_ROW // HEADS), is_value)
    tl.store(keys, new_key.to(key_cache.dtype.element_ty), mask=is_key)
    tl.store(values, new_value.to(value_cache.dtype.element_ty), mask=is_value)


def launch_store_kv(args: Any) -> None:
    """Launch ``store_kv``."""
    key_cache, value_cache = args.key_cache, args.value_cache
    # A slice of a fused projection has dense rows and is read in place.
    key, value = (
        rows if has_dense_rows(rows) else rows.contiguous()
        for rows in (args.key_TMD, args.value_TMD)
    )
    if key_cache.dtype == FP8:
        check_float8(key_cache.device, "store_kv")
    tokens, key_row, value_row = len(key), key[:1].numel(), value[:1].numel()
    row = max(key_row, value_row)
    block = min(1024, triton.next_power_of_2(max(row, 1)))
    launch(
        store_kv_kernel, (tokens, triton.cdiv(row, block)), args,
        key_cache=key_cache, value_cache=value_cache, key=key, value=value,
        slots=key_cache.shape[0], key_stride=key.stride(0), value_stride=value.stride(0),
        HEADS=key_cache.shape[1], IS_FP8=key_cache.dtype == FP8,
        KEY_ROW=key_row, VALUE_ROW=value_row, KEY_SLOT=key_cache.stride(0),
        VALUE_SLOT=value_cache.stride(0), BLOCK=block, num_warps=4 if block > 256 else 1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["slots"])
def move_kv_kernel(
    table, scratch, tgt_loc, src_loc, slots, scratch_stride,
    WORD: tl.constexpr, BLOCK: tl.constexpr, SCATTER: tl.constexpr, STARTS_EARLY: tl.constexpr,
):  # fmt: skip
    """One program per pair, buffer and BLOCK words: source to scratch, or scratch to target."""
    wait_for_kernel_before(STARTS_EARLY)
    pair = tl.program_id(0).to(tl.int64)
    buffer = table + tl.program_id(1) * 3
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(src_loc + pair)
    target = tl.load(tgt_loc + pair)
    words = tl.load(buffer + 1) // WORD
    inside = (source >= 0) & (source < slots) & (target >= 0) & (target < slots) & (column < words)
    rows = tl.load(buffer).to(tl.pointer_type(scratch.dtype.element_ty))
    kept = scratch + pair * scratch_stride + tl.load(buffer + 2) // WORD + column
    if SCATTER:
        tl.store(rows + target * words + column, tl.load(kept, mask=inside), mask=inside)
    else:
        tl.store(kept, tl.load(rows + source * words + column, mask=inside), mask=inside)


def launch_move_kv(args: Any) -> None:
    """Launch ``move_kv``."""
    pairs = args.tgt_loc.numel()
    sizes = [buffer[0].nbytes for buffer in args.buffers if buffer.shape[0]]
    if pairs == 0 or not any(sizes):
        return
    word = gcd(8, *sizes)
    stride, words = sum(sizes) // word, max(sizes) // word
    block = min(1024, triton.next_power_of_2(words))
    scratch = torch.empty(pairs * stride, dtype=WORDS[word], device=args.table.device)
    for scatter in (False, True):
        launch(
            move_kv_kernel, (pairs, len(args.buffers), triton.cdiv(words, block)), args,
            scratch=scratch, slots=args.buffers[0].shape[0], scratch_stride=stride,
            WORD=word, BLOCK=block, SCATTER=scatter, num_warps=4 if block > 256 else 1,
        )  # fmt: skip
