"""Products with quantised weights and others, for CUDA.

Contracts: ``graphkit.ops.quantized_linear`` and ``graphkit.ops.linear``.

``choose_product`` selects the kernel of ``tiled_linear.py``, or one that streams the weight, which
``streamed_launch.py`` launches. Where the outputs give too few tiles for the device, the inputs are
split. Each part writes its sums in float32, and a second kernel adds them in order.

The bits of a row of a row-invariant product do not depend on the other rows. The weight alone
decides the parts, and which lines of a part have a sum of their own. Inputs are added in order, or,
of numbers of four bits and with scales of blocks, blocks of 128 inputs, each multiplied by its
scale. The numbers are exact in the dtype of the rows.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from graphkit.ops.kernels.decoder import gate_rows, sum_of_parts
from graphkit.ops.kernels.devices import check_float8
from graphkit.ops.kernels.launch import launch, wait_for_kernel_before
from graphkit.ops.kernels.quantized_linear_config import Product, TiledProduct, choose_product
from graphkit.ops.kernels.quantized_numbers import float8_numbers, nibbles, of_block, scale_row
from graphkit.ops.kernels.streamed_launch import launch_streamed
from graphkit.ops.kernels.streamed_product import StreamedProduct
from graphkit.ops.kernels.tiled_linear import launch_tiles
from graphkit.ops.linear import MOST_ROWS_IN_PARTS
from graphkit.ops.quantized_layout import BLOCK, dequantized

SUM_BLOCK = 512
"""Results that a program of the second kernel adds."""


@triton.jit(do_not_specialize=["size"])
def sum_parts_kernel(
    out, parts, size, SPLITS: tl.constexpr, STARTS_EARLY: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Add the sums of all parts of the inputs in order."""
    wait_for_kernel_before(STARTS_EARLY)
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_place = place < size
    total = sum_of_parts(parts + place, size, is_place, SPLITS, out.dtype.element_ty)
    tl.store(out + place, total, mask=is_place)


@triton.jit
def widen_kernel(
    out, weight, zero_point, N: tl.constexpr, K: tl.constexpr, ROW: tl.constexpr,
    IS_PACKED: tl.constexpr, SCALE_ROWS: tl.constexpr, SCALE_COLUMNS: tl.constexpr,
    BLOCK_N: tl.constexpr, STARTS_EARLY: tl.constexpr,
):  # fmt: skip
    """Convert the numbers of a weight to the dtype of ``out``, without scales, which is exact.

    One program per step of the inputs, as in ``linear_kernel``, and tile of outputs.
    """
    wait_for_kernel_before(STARTS_EARLY)
    step = tl.program_id(0)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    lane = tl.arange(0, 128)
    element = step * 128 + lane
    is_n, is_number = n < N, (n < N)[:, None] & (element < ROW)[None, :]
    row = n.to(tl.int64)[:, None]
    loaded = tl.load(weight + row * ROW + element[None, :], mask=is_number, other=0)
    if IS_PACKED:
        at = step * 256 + lane
        place = scale_row(n, N, SCALE_ROWS) * SCALE_COLUMNS
        zero = tl.full([BLOCK_N, 1], 8, tl.uint8)
        high_zero = zero
        if zero_point is not None:
            column = step * 2 if SCALE_COLUMNS > 1 else 0
            high_column = step * 2 + 1 if SCALE_COLUMNS > 1 else 0
            zero = of_block(zero_point, place, column, is_n, SCALE_COLUMNS, False)
            high_zero = of_block(zero_point, place, high_column, is_n, SCALE_COLUMNS, False)
        low = nibbles(loaded, zero, out.dtype.element_ty, 0)
        high = nibbles(loaded, high_zero, out.dtype.element_ty, 4)
        numbers = out + row * K + at[None, :]
        tl.store(numbers, low, mask=is_n[:, None] & (at < K)[None, :])
        tl.store(numbers + 128, high, mask=is_n[:, None] & (at + 128 < K)[None, :])
    else:
        wide = float8_numbers(loaded, out.dtype.element_ty)
        tl.store(out + row * K + element[None, :], wide, mask=is_number)


def launch_quantized_linear(args: Any, product: Product | None = None) -> torch.Tensor:
    """Launch ``quantized_linear``, with ``choose_product`` by default."""
    x, numbers, scale = args.x.contiguous(), args.weight.contiguous(), args.scale
    (rows, inputs), outputs = x.shape, len(numbers)
    is_packed = numbers.dtype == torch.uint8
    if not is_packed:
        check_float8(x.device, "quantized_linear")
    weight = {
        "weight": numbers.view(torch.uint8), "N": outputs, "K": inputs, "ROW": numbers.shape[1],
        "IS_PACKED": is_packed, "SCALE_ROWS": scale.shape[0], "SCALE_COLUMNS": scale.shape[1],
    }  # fmt: skip
    bits = 4 if is_packed else 8
    product = product or choose_product(
        rows, inputs, outputs, bits, x.device, x.dtype, args.row_invariant
    )
    if product is None:
        matrix = dequantized(numbers, scale, args.zero_point, inputs, x.dtype)
        bias = None if args.bias is None else args.bias.to(x.dtype)
        return finished(args, torch.nn.functional.linear(x, matrix, bias))
    if isinstance(product, TiledProduct) and product.widens:
        matrix = x.new_empty(outputs, inputs)
        grid = triton.cdiv(numbers.shape[1], BLOCK), triton.cdiv(outputs, 64)
        launch(widen_kernel, grid, args, out=matrix, BLOCK_N=64, **weight)
        weight |= {"weight": matrix, "ROW": inputs, "IS_PACKED": False, "zero_point": None}
    # Of numbers of four bits, warpgroups multiply some of both blocks of a line in turn.
    weight["SCALES_BLOCKS"] = is_packed or scale.shape[1] > 1
    return launch_product(args, product, x, **weight)


def launch_product(args: Any, product: Product, x: torch.Tensor, **weight: Any) -> torch.Tensor:
    """Launch the product of rows with a weight of any format, and the kernels behind it.

    Args:
        args: Arguments of the op.
        product: How the launch divides its work.
        x: The rows, contiguous.
        weight: The weight, and what describes it among the parameters of ``linear_kernel``.
    """
    rows, outputs = len(x), weight["N"]
    splits = product.splits
    if splits > 1 and rows > MOST_ROWS_IN_PARTS:
        sliced = args._replace(split_k_partials=False)
        slices = x.split(MOST_ROWS_IN_PARTS)
        out = torch.cat([launch_product(sliced, product, rows, **weight) for rows in slices])
        return out[None] if args.split_k_partials else out
    is_gated = args.swiglu and splits == 1 and outputs % product.outputs == 0
    columns = outputs // 2 if is_gated else outputs
    dtype = x.dtype if splits == 1 else torch.float32
    parts: torch.Tensor = x.new_empty(splits, rows, columns, dtype=dtype)
    if isinstance(product, StreamedProduct):
        launch_streamed(args, product, parts, x, is_gated, weight)
    else:
        launch_tiles(args, product, parts, x, is_gated, weight)
    return parts[0] if is_gated else joined(args, parts)


def joined(args: Any, parts: torch.Tensor) -> torch.Tensor:
    """Return what an op with these arguments returns, from its parts, [S, T, N]."""
    if args.split_k_partials:
        return parts
    if len(parts) == 1:
        return finished(args, parts[0])
    out: torch.Tensor = args.x.new_empty(parts.shape[1:])
    launch(
        sum_parts_kernel, (triton.cdiv(out.numel(), SUM_BLOCK),), args, out=out, parts=parts,
        size=out.numel(), SPLITS=len(parts), BLOCK=SUM_BLOCK, num_warps=4,
    )  # fmt: skip
    return finished(args, out)


def finished(args: Any, out: torch.Tensor) -> torch.Tensor:
    """Return what an op with these arguments returns, from the product of all inputs, [T, N]."""
    if args.swiglu:
        return gate_rows(args, out, out.new_empty(len(out), out.shape[1] // 2))
    return out[None] if args.split_k_partials else out
