"""Products with quantised weights for CUDA. Contract: ``graphkit.ops.quantized_linear``.

A program holds a tile of outputs by rows, and passes over a part of the inputs, a block of 128 at a
time. It loads the numbers of the block, converts them in registers to the dtype of the rows, which
is exact, and multiplies. Scales are applied to the sum of a block, not to each number. The weight
is the left operand of the product, so that few rows of ``x`` waste little of it.

Where the outputs give too few tiles for the device, the inputs are split. Each part writes its sums
in float32, and a second kernel adds them in order. The split depends on the weight alone: a row's
result does not depend on the other rows.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from graphkit.ops.kernels.launch import launch
from graphkit.ops.kernels.quantized_linear_config import Product, choose_product
from graphkit.ops.quantized_linear import blocks

SUM_BLOCK = 512
"""Results that a program of the second kernel adds."""


@triton.jit
def _float8(loaded, dtype: tl.constexpr):
    """Return the numbers that bytes hold as float8_e4m3fn, in a dtype that has all of them.

    Through float32, since Triton 3.7 converts to bfloat16 by an instruction of a quarter of the
    speed.
    """
    return loaded.to(tl.float8e4nv, bitcast=True).to(tl.float32).to(dtype)


@triton.jit
def _numbers(loaded, zero, dtype: tl.constexpr):
    """Return the two numbers of four bits in each byte less their zero point, of a dtype.

    In 16 bits a number is the lowest bits of a power of two, 128 in bfloat16 and 1024 in float16,
    from which that power and the zero point are subtracted, exactly. A conversion of integers has
    a quarter of that speed.
    """
    wide, zero = loaded.to(tl.int16), zero.to(tl.int16)
    low, high = wide & 15, wide >> 4
    if dtype == tl.float32:
        low, high = (low - zero).to(dtype), (high - zero).to(dtype)
    else:
        POWER: tl.constexpr = 0x4300 if dtype == tl.bfloat16 else 0x6400
        offset = (zero | POWER).to(dtype, bitcast=True)
        low = (low | POWER).to(dtype, bitcast=True) - offset
        high = (high | POWER).to(dtype, bitcast=True) - offset
    return low, high


@triton.jit(do_not_specialize=["rows"])
def quantized_linear_kernel(
    out, x, weight, scale, zero_point, bias, rows,
    N: tl.constexpr, K: tl.constexpr, ROW_BYTES: tl.constexpr, IS_PACKED: tl.constexpr,
    SCALE_ROWS: tl.constexpr, SCALE_COLUMNS: tl.constexpr, BLOCKS: tl.constexpr,
    IS_SPLIT: tl.constexpr, STARTS_EARLY: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """One program per tile of outputs, tile of rows and part of the inputs, of BLOCKS blocks."""
    if STARTS_EARLY:
        tl.extra.cuda.gdc_wait()
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    first = tl.program_id(2) * BLOCKS
    is_n, is_t = n < N, t < rows
    WIDTH: tl.constexpr = 64 if IS_PACKED else 128
    lane = tl.arange(0, WIDTH)
    numbers = weight + n.to(tl.int64)[:, None] * ROW_BYTES + lane[None, :]
    inputs = x + t.to(tl.int64)[None, :] * K + lane[:, None]
    scale_row = n if SCALE_ROWS == N else n // 128
    if SCALE_ROWS == 1:
        scale_row = n * 0
    total = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    for index in range(BLOCKS):
        block = first + index
        is_number = is_n[:, None] & (block * WIDTH + lane < ROW_BYTES)[None, :]
        loaded = tl.load(numbers + block * WIDTH, mask=is_number, other=0)
        at = block * 128 + lane
        column = block if SCALE_COLUMNS > 1 else 0
        is_scale = is_n & (column < SCALE_COLUMNS)
        place = scale_row * SCALE_COLUMNS + column
        some = tl.load(inputs + block * 128, mask=(at < K)[:, None] & is_t[None, :], other=0.0)
        if IS_PACKED:
            zero = tl.full([BLOCK_N], 8, tl.uint8)
            if zero_point is not None:
                zero = tl.load(zero_point + place, mask=is_scale, other=0)
            low, high = _numbers(loaded, zero[:, None], x.dtype.element_ty)
            is_more = (at + 64 < K)[:, None] & is_t[None, :]
            more = tl.load(inputs + block * 128 + 64, mask=is_more, other=0.0)
            products = tl.dot(low, some, input_precision=PRECISION)
            products = tl.dot(high, more, products, input_precision=PRECISION)
        else:
            wide = _float8(loaded, x.dtype.element_ty)
            products = tl.dot(wide, some, input_precision=PRECISION)
        if SCALE_COLUMNS > 1:
            factor = tl.load(scale + place, mask=is_scale, other=0.0).to(tl.float32)
            total += products * factor[:, None]
        else:
            total += products
    if SCALE_COLUMNS == 1:
        total *= tl.load(scale + scale_row, mask=is_n, other=0.0).to(tl.float32)[:, None]
    places = t.to(tl.int64)[None, :] * N + n[:, None]
    is_place = is_n[:, None] & is_t[None, :]
    if IS_SPLIT:
        part = tl.program_id(2).to(tl.int64) * rows * N
        tl.store(out + part + places, total, mask=is_place)
    else:
        if bias is not None:
            total += tl.load(bias + n, mask=is_n, other=0.0).to(tl.float32)[:, None]
        tl.store(out + places, total.to(out.dtype.element_ty), mask=is_place)


@triton.jit(do_not_specialize=["size"])
def sum_parts_kernel(
    out, parts, bias, size, SPLITS: tl.constexpr, N: tl.constexpr, STARTS_EARLY: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Add the sums of all parts of the inputs in order, and the bias."""
    if STARTS_EARLY:
        tl.extra.cuda.gdc_wait()
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_place = place < size
    total = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(parts + split * size + place, mask=is_place, other=0.0)
    if bias is not None:
        total += tl.load(bias + place % N, mask=is_place, other=0.0).to(tl.float32)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=is_place)


@triton.jit
def dequantize_kernel(
    out, weight, scale, zero_point, N: tl.constexpr, K: tl.constexpr, ROW_BYTES: tl.constexpr,
    IS_PACKED: tl.constexpr, SCALE_ROWS: tl.constexpr, SCALE_COLUMNS: tl.constexpr,
    BLOCK_N: tl.constexpr, STARTS_EARLY: tl.constexpr,
):  # fmt: skip
    """One program per block of inputs and tile of outputs."""
    if STARTS_EARLY:
        tl.extra.cuda.gdc_wait()
    block = tl.program_id(0)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    WIDTH: tl.constexpr = 64 if IS_PACKED else 128
    lane = tl.arange(0, WIDTH)
    byte = block * WIDTH + lane
    is_n, is_number = n < N, (n < N)[:, None] & (byte < ROW_BYTES)[None, :]
    row = n.to(tl.int64)[:, None]
    loaded = tl.load(weight + row * ROW_BYTES + byte[None, :], mask=is_number, other=0)
    scale_row = n if SCALE_ROWS == N else n // 128
    if SCALE_ROWS == 1:
        scale_row = n * 0
    place = scale_row * SCALE_COLUMNS + (block if SCALE_COLUMNS > 1 else 0)
    factor = tl.load(scale + place, mask=is_n, other=0.0).to(tl.float32)[:, None]
    at = block * 128 + lane
    place_out = out + row * K + at[None, :]
    if IS_PACKED:
        zero = tl.full([BLOCK_N], 8, tl.uint8)
        if zero_point is not None:
            zero = tl.load(zero_point + place, mask=is_n, other=0)
        low, high = _numbers(loaded, zero[:, None], tl.float32)
        is_low, is_high = is_n[:, None] & (at < K)[None, :], is_n[:, None] & (at + 64 < K)[None, :]
        tl.store(place_out, (low * factor).to(out.dtype.element_ty), mask=is_low)
        tl.store(place_out + 64, (high * factor).to(out.dtype.element_ty), mask=is_high)
    else:
        wide = _float8(loaded, tl.float32) * factor
        tl.store(place_out, wide.to(out.dtype.element_ty), mask=is_number)


def launch_quantized_linear(args: Any, product: Product | None = None) -> torch.Tensor:
    """Launch ``quantized_linear``, with ``choose_product`` by default."""
    x, weight, scale = args.x.contiguous(), args.weight, args.scale
    (rows, inputs), outputs = x.shape, len(weight)
    shape = {
        "weight": weight.contiguous().view(torch.uint8), "N": outputs, "K": inputs,
        "ROW_BYTES": weight.shape[1], "IS_PACKED": weight.dtype == torch.uint8,
        "SCALE_ROWS": scale.shape[0], "SCALE_COLUMNS": scale.shape[1],
    }  # fmt: skip
    product = product or choose_product(rows, inputs, outputs, x.device, x.dtype)
    if product is None:
        matrix = x.new_empty(outputs, inputs)
        grid = blocks(inputs), triton.cdiv(outputs, 64)
        launch(dequantize_kernel, grid, args, out=matrix, BLOCK_N=64, **shape)
        bias = None if args.bias is None else args.bias.to(x.dtype)
        return torch.nn.functional.linear(x, matrix, bias)
    out: torch.Tensor = x.new_empty(rows, outputs)
    splits = product.splits
    parts = out if splits == 1 else x.new_empty(splits, rows, outputs, dtype=torch.float32)
    grid_of_product = triton.cdiv(outputs, product.outputs), triton.cdiv(rows, product.rows), splits
    launch(
        quantized_linear_kernel, grid_of_product, args, out=parts, x=x, rows=rows,
        BLOCKS=triton.cdiv(blocks(inputs), splits), IS_SPLIT=splits > 1,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        BLOCK_N=product.outputs, BLOCK_T=product.rows,
        num_warps=product.num_warps, num_stages=product.num_stages, **shape,
    )  # fmt: skip
    if splits > 1:
        grid_of_sum = (triton.cdiv(out.numel(), SUM_BLOCK),)
        launch(
            sum_parts_kernel, grid_of_sum, args, out=out, parts=parts, size=out.numel(),
            SPLITS=splits, N=outputs, BLOCK=SUM_BLOCK, num_warps=4,
        )  # fmt: skip
    return out
