"""The write into a KV cache for CUDA. Contract: ``graphkit.ops.store_kv``."""

from typing import Any

import triton
import triton.language as tl

from graphkit.ops.attention_layout import has_dense_rows
from graphkit.ops.kernels.launch import launch


@triton.jit
def store_kv_kernel(
    key_cache, value_cache, loc_T, key, value, slots, key_stride, value_stride,
    KEY_ROW: tl.constexpr, VALUE_ROW: tl.constexpr,
    KEY_SLOT: tl.constexpr, VALUE_SLOT: tl.constexpr, BLOCK: tl.constexpr,
    STARTS_EARLY: tl.constexpr,
):  # fmt: skip
    """One program per token and BLOCK of its M * D elements; slots are KEY_SLOT elements apart."""
    if STARTS_EARLY:
        tl.extra.cuda.gdc_wait()
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
    tl.store(keys, new_key.to(key_cache.dtype.element_ty), mask=is_key)
    tl.store(values, new_value.to(value_cache.dtype.element_ty), mask=is_value)


def launch_store_kv(given: Any) -> None:
    """Launch ``store_kv``."""
    key_cache, value_cache = given.key_cache, given.value_cache
    # A slice of a fused projection has dense rows and is read in place.
    key, value = (
        rows if has_dense_rows(rows) else rows.contiguous()
        for rows in (given.key_TMD, given.value_TMD)
    )
    tokens, key_row, value_row = len(key), key[:1].numel(), value[:1].numel()
    row = max(key_row, value_row)
    block = min(1024, triton.next_power_of_2(max(row, 1)))
    launch(
        store_kv_kernel, (tokens, triton.cdiv(row, block)), given,
        key_cache=key_cache, value_cache=value_cache, key=key, value=value,
        slots=key_cache.shape[0], key_stride=key.stride(0), value_stride=value.stride(0),
        KEY_ROW=key_row, VALUE_ROW=value_row, KEY_SLOT=key_cache.stride(0),
        VALUE_SLOT=value_cache.stride(0), BLOCK=block, num_warps=4 if block > 256 else 1,
    )  # fmt: skip
