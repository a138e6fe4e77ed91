"""The write into a KV cache for CUDA. Contract: ``graphkit.ops.store_kv``."""

import torch
import triton
import triton.language as tl


@triton.jit
def store_kv_kernel(
    key_cache, value_cache, loc_T, key, value, slots, key_stride, value_stride,
    ROW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per token and BLOCK of its M * D elements."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(loc_T + token)
    inside = (at < ROW) & (slot >= 0) & (slot < slots)
    key_row = tl.load(key + token * key_stride + at, mask=inside)
    value_row = tl.load(value + token * value_stride + at, mask=inside)
    tl.store(key_cache + slot * ROW + at, key_row.to(key_cache.dtype.element_ty), mask=inside)
    tl.store(value_cache + slot * ROW + at, value_row.to(value_cache.dtype.element_ty), mask=inside)


def launch_store_kv(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    loc_T: torch.Tensor,
    key_TMD: torch.Tensor,
    value_TMD: torch.Tensor,
) -> None:
    """Launch on the current stream; arguments as in ``graphkit.ops.store_kv.store_kv``."""
    tokens, heads, head_dim = key_TMD.shape
    row = heads * head_dim
    if tokens == 0 or row == 0:
        return
    key, value = _dense_rows(key_TMD), _dense_rows(value_TMD)
    block = min(1024, triton.next_power_of_2(row))
    store_kv_kernel[(tokens, triton.cdiv(row, block))](
        key_cache, value_cache, loc_T.contiguous(), key, value, key_cache.shape[0],
        key.stride(0), value.stride(0), ROW=row, BLOCK=block, num_warps=4 if block > 256 else 1,
    )  # fmt: skip


def _dense_rows(rows: torch.Tensor) -> torch.Tensor:
    """The rows themselves where each is contiguous, as in a slice of a fused QKV; else a copy."""
    dense = rows.stride(2) == 1 and rows.stride(1) == rows.shape[2]
    return rows if dense else rows.contiguous()
