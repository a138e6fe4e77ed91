"""The write into a KV cache for CUDA. Contract: ``graphkit.ops.store_kv``."""

import torch
import triton
import triton.language as tl

from graphkit.ops.attention_layout import has_dense_rows


@triton.jit
def store_kv_kernel(
    key_cache, value_cache, loc_T, key, value, slots, key_stride, value_stride,
    KEY_ROW: tl.constexpr, VALUE_ROW: tl.constexpr,
    KEY_SLOT: tl.constexpr, VALUE_SLOT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per token and BLOCK of its M * D elements; slots lie KEY_SLOT elements apart."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(loc_T + token)
    inside = (slot >= 0) & (slot < slots)
    is_key = inside & (at < KEY_ROW)
    is_value = inside & (at < VALUE_ROW)
    new_key = tl.load(key + token * key_stride + at, mask=is_key)
    new_value = tl.load(value + token * value_stride + at, mask=is_value)
    keys = key_cache + slot * KEY_SLOT + at
    values = value_cache + slot * VALUE_SLOT + at
    tl.store(keys, new_key.to(key_cache.dtype.element_ty), mask=is_key)
    tl.store(values, new_value.to(value_cache.dtype.element_ty), mask=is_value)


def launch_store_kv(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    loc_T: torch.Tensor,
    key_TMD: torch.Tensor,
    value_TMD: torch.Tensor,
) -> None:
    """Launch on the current stream; arguments as in ``graphkit.ops.store_kv.store_kv``."""
    tokens, heads, _ = key_TMD.shape
    key_row, value_row = heads * key_TMD.shape[2], heads * value_TMD.shape[2]
    row = max(key_row, value_row)
    if tokens == 0 or row == 0:
        return
    # A slice of a fused projection may stay as it is.
    key, value = (
        rows if has_dense_rows(rows) else rows.contiguous() for rows in (key_TMD, value_TMD)
    )
    block = min(1024, triton.next_power_of_2(row))
    store_kv_kernel[(tokens, triton.cdiv(row, block))](
        key_cache, value_cache, loc_T.contiguous(), key, value, key_cache.shape[0],
        key.stride(0), value.stride(0), KEY_ROW=key_row, VALUE_ROW=value_row,
        KEY_SLOT=key_cache.stride(0), VALUE_SLOT=value_cache.stride(0), BLOCK=block,
        num_warps=4 if block > 256 else 1,
    )  # fmt: skip
