"""Products with weights of the dtype of their rows for CUDA. Contracts: ``graphkit.ops.linear``.

The parts of a weight decide the bits of a row. More than ``FEW_PLAIN_ROWS`` rows are multiplied by
cuBLAS, part by part, where it adds the inputs of a part in order, as the kernels do.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch.nn import functional

from graphkit.ops.kernel_requests import kernel_requests
from graphkit.ops.kernels.devices import has_dependent_launch
from graphkit.ops.kernels.launch import launch, wait_for_kernel_before
from graphkit.ops.kernels.quantized_linear import finished, joined, launch_product
from graphkit.ops.kernels.quantized_linear_config import Product, TiledProduct, choose_product
from graphkit.ops.kernels.streamed_plain_config import FEW_PLAIN_ROWS
from graphkit.ops.linear import (
    MOST_ROWS_IN_PARTS,
    MOST_STEP_ROWS,
    empty_head_products,
    multiply,
)
from graphkit.ops.quantized_layout import BLOCK

HEAD_TILE, HEAD_BLOCK = 64, 64
"""Results and inputs of a head that a program multiplies at once."""
_adds_in_order: dict[tuple[Any, ...], bool] = {}
"""Whether cuBLAS has the bits of the kernels, by parts, shapes, dtype and device of a product."""


def launch_linear(args: Any, product: Product | None = None) -> torch.Tensor:
    """Launch ``linear``, with ``choose_product`` by default."""
    x, weight = args.x, args.weight
    (rows, inputs), outputs = x.shape, len(weight)
    # A prompt fills the device without a split of the inputs, and then writes no sums in float32.
    may_split = args.row_invariant or rows <= MOST_STEP_ROWS
    if product is None and weight.is_contiguous() and may_split:
        bits = 8 * weight.element_size()
        product = choose_product(rows, inputs, outputs, bits, x.device, x.dtype)
        if product and product.splits > 1 and rows > MOST_ROWS_IN_PARTS:
            sliced = args._replace(split_k_partials=False)
            slices = x.split(MOST_ROWS_IN_PARTS)
            out = torch.cat([launch_linear(sliced._replace(x=rows)) for rows in slices])
            return out[None] if args.split_k_partials else out
        if product and rows > FEW_PLAIN_ROWS:
            key = product.splits, x.shape, weight.shape, x.dtype, args.bias is None, x.device
            sums = args._replace(swiglu=False, split_k_partials=True)
            by_cublas = partial(_parts_by_cublas, args, product)
            by_kernel = lambda rows: launch_linear(sums._replace(x=rows), product)  # noqa: E731
            if _cublas_adds_in_order(key, x, by_cublas, by_kernel):
                return joined(args, by_cublas(x))
    if product is None:
        return finished(args, multiply(x, weight, args.bias))
    return launch_product(
        args, product, x.contiguous(), weight=weight.contiguous(), N=outputs, K=inputs,
        ROW=inputs, IS_PACKED=False, scale=None, zero_point=None, SCALE_ROWS=0, SCALE_COLUMNS=0,
        SCALES_BLOCKS=False,
    )  # fmt: skip


def _parts_by_cublas(args: Any, product: Product, x: torch.Tensor) -> torch.Tensor:
    """Return the sums of each part of the inputs, [S, T, N], with the bias in the first."""
    weight, bias, splits = args.weight, args.bias, product.splits
    if splits == 1:
        return functional.linear(x, weight, bias)[None]
    wide: dict[str, Any] = {} if x.dtype == torch.float32 else {"out_dtype": torch.float32}
    inputs: int = x.shape[1] // splits
    if isinstance(product, TiledProduct):
        inputs = triton.cdiv(x.shape[1], BLOCK * splits) * BLOCK
    parts: torch.Tensor
    if inputs * splits == x.shape[1]:
        row_parts = x.unflatten(1, (splits, -1)).transpose(0, 1)
        weight_parts = weight.unflatten(1, (splits, -1)).permute(1, 2, 0)
        parts = torch.bmm(row_parts, weight_parts, **wide)
    else:  # the last part is shorter
        pairs = zip(x.split(inputs, 1), weight.split(inputs, 1), strict=True)
        parts = torch.stack([torch.mm(rows, part.t(), **wide) for rows, part in pairs])
    if bias is not None:
        parts[0] += bias
    return parts


def _cublas_adds_in_order(
    key: tuple[Any, ...],
    x: torch.Tensor,
    by_cublas: Callable[[torch.Tensor], torch.Tensor],
    by_kernel: Callable[[torch.Tensor], torch.Tensor],
) -> bool:
    """Return whether products by cuBLAS have the bits of the kernels.

    It is measured once for each key and outside of captures, on random rows, of which every tile of
    cuBLAS has at least one. cuBLAS of CUDA 13.0 on an H200 has them for all parts that the kernels
    choose; it has not where it splits a part once more.

    Args:
        key: What decides how both multiply.
        x: The rows, [..., T, K].
        by_cublas: Multiplies such rows by cuBLAS, [..., T, N].
        by_kernel: Multiplies some of them by the kernels.
    """
    if key not in _adds_in_order:
        every = x.shape[-2] // FEW_PLAIN_ROWS
        requests = kernel_requests.get()
        if requests is not None and requests.is_requesting:
            by_kernel(x[..., ::every, :])  # it does not run: there is nothing to compare
            return True
        if not x.is_cuda or torch.cuda.is_current_stream_capturing():
            return False
        generator = torch.Generator(x.device).manual_seed(0)
        rows = torch.empty_like(x).normal_(generator=generator)  # with the strides of x
        some = by_kernel(rows[..., ::every, :])
        _adds_in_order[key] = torch.equal(some, by_cublas(rows)[..., ::every, :])
    return _adds_in_order[key]


@triton.jit(do_not_specialize=["count"])
def multiply_heads_kernel(
    out, rows, weight, count, row_head_stride, row_stride, weight_head_stride, weight_row_stride,
    weight_column_stride, K: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr, STARTS_EARLY: tl.constexpr,
):  # fmt: skip
    """One program per tile of columns, tile of rows and head. Inputs are added in order."""
    wait_for_kernel_before(STARTS_EARLY)
    head = tl.program_id(2).to(tl.int64)
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    lane = tl.arange(0, BLOCK_K)
    left = rows + head * row_head_stride + t.to(tl.int64)[:, None] * row_stride + lane[None, :]
    right = weight + head * weight_head_stride + lane[:, None] * weight_row_stride
    right += c[None, :] * weight_column_stride
    total = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
    for first in range(0, K, BLOCK_K):
        is_lane = first + lane < K
        is_left = (t < count)[:, None] & is_lane[None, :]
        is_right = is_lane[:, None] & (c < C)[None, :]
        some = tl.load(left + first, mask=is_left, other=0.0)
        part = tl.load(right + first * weight_row_stride, mask=is_right, other=0.0)
        total = tl.dot(some, part, total, input_precision=PRECISION)
    cells = out + (t.to(tl.int64) * tl.num_programs(2) + head)[:, None] * C + c[None, :]
    is_cell = (t < count)[:, None] & (c < C)[None, :]
    tl.store(cells, total.to(out.dtype.element_ty), mask=is_cell)


def launch_multiply_heads(args: Any) -> torch.Tensor:
    """Launch ``multiply_heads``."""
    rows, weight = args.rows, args.weight
    by_cublas, by_kernel = partial(_heads_by_cublas, args), partial(_heads_by_kernel, args)
    can_add_in_order = not rows.is_cuda or has_dependent_launch(rows.device)
    if rows.dtype != torch.float64 and can_add_in_order:
        key = rows.shape, rows.stride(), weight.shape, weight.stride(), rows.dtype, rows.device
        is_large = rows.shape[1] > FEW_PLAIN_ROWS
        if not is_large or not _cublas_adds_in_order(key, rows, by_cublas, by_kernel):
            return by_kernel(rows)
    return by_cublas(rows)


def _heads_by_cublas(args: Any, rows: torch.Tensor) -> torch.Tensor:
    return torch.bmm(rows, args.weight, out=empty_head_products(args._replace(rows=rows)))


def _heads_by_kernel(args: Any, rows: torch.Tensor) -> torch.Tensor:
    rows = rows if rows.stride(2) == 1 else rows.contiguous()
    (heads, count, inputs), weight = rows.shape, args.weight
    columns = weight.shape[2]
    out = empty_head_products(args._replace(rows=rows))
    most = HEAD_TILE // 2 if rows.dtype == torch.float32 else HEAD_TILE  # as registers allow
    tile = min(most, max(16, triton.next_power_of_2(count)))
    grid = triton.cdiv(columns, HEAD_TILE), triton.cdiv(count, tile), heads
    launch(
        multiply_heads_kernel, grid, args, out=out, rows=rows, weight=weight, count=count,
        row_head_stride=rows.stride(0), row_stride=rows.stride(1),
        weight_head_stride=weight.stride(0), weight_row_stride=weight.stride(1),
        weight_column_stride=weight.stride(2), K=inputs, C=columns,
        PRECISION="ieee" if rows.dtype == torch.float32 else "tf32",
        BLOCK_T=tile, BLOCK_C=HEAD_TILE, BLOCK_K=HEAD_BLOCK, num_warps=4, num_stages=3,
    )  # fmt: skip
    return out
