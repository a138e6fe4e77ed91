"""Joins the partial results of attention over splits of the keys."""

from typing import Any

import torch
import triton
import triton.language as tl

from graphkit.ops.kernels.launch import launch


@triton.jit(do_not_specialize=["rows", "splits"])
def join_splits_kernel(
    out, partial, lse, rows, splits,
    HEAD_DIM: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
    STARTS_EARLY: tl.constexpr,
):  # fmt: skip
    """One program per (token, head) row and BLOCK_D of its dimensions."""
    if STARTS_EARLY:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    dim = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    is_dim = dim < HEAD_DIM
    split = tl.arange(0, BLOCK_S)
    entry = split * rows + row
    is_split = split < splits
    weight_log2 = tl.load(lse + entry, mask=is_split, other=float("-inf"))
    top = tl.max(weight_log2, 0)
    weight = tl.exp2(weight_log2 - tl.where(top == float("-inf"), 0.0, top))
    is_cell = is_split[:, None] & is_dim[None, :]
    results = tl.load(partial + entry[:, None] * HEAD_DIM + dim[None, :], mask=is_cell, other=0.0)
    total = tl.sum(weight, 0)
    result = tl.sum(results * weight[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out + row * HEAD_DIM + dim, result.to(out.dtype.element_ty), mask=is_dim)


def join_splits(given: Any, out: torch.Tensor, partial: torch.Tensor, lse: torch.Tensor) -> None:
    """Write the weighted mean of the partial results, which the kernel before it writes.

    Args:
        given: Arguments of the op.
        out: Result, [T, N, D].
        partial: Result of each split, normalised, 0 where the weight is; float32 [splits, T, N, D].
        lse: Base-2 logarithm of the weight of each partial result; float32 [splits, T, N].
    """
    splits, (tokens, heads, head_dim) = partial.shape[0], out.shape
    rows, block_splits = tokens * heads, triton.next_power_of_2(splits)
    # A warp keeps 64 numbers per thread. Many small programs start sooner than few large ones.
    block = min(max(32, 2048 // block_splits), 128, triton.next_power_of_2(head_dim))
    launch(
        join_splits_kernel, (rows, triton.cdiv(head_dim, block)), given,
        out=out, partial=partial, lse=lse, rows=rows, splits=splits, HEAD_DIM=head_dim,
        BLOCK_S=block_splits, BLOCK_D=block, num_warps=1,
    )  # fmt: skip
