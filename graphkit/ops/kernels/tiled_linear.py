"""Products of rows with weights of any format, in tiles of outputs and rows, for CUDA.

A program holds a tile of outputs by rows, and passes over a part of the inputs in steps. A step is
128 numbers of each output, a block of inputs; or 128 bytes that hold the numbers of four bits of a
pair of blocks (``graphkit.ops.quantized_layout``). The program loads the numbers, converts them in
registers to the dtype of the rows, which is exact, and multiplies. Scales are applied to the sum of
a block, and not to each number. The weight is the left operand of the product, so that few rows of
``x`` waste little of it. A weight of the dtype of the rows is not converted: it has no scales, or
numbers that were converted before, for many rows.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from graphkit.ops.kernels.decoder import gated
from graphkit.ops.kernels.devices import has_bfloat16_fma
from graphkit.ops.kernels.launch import launch
from graphkit.ops.kernels.quantized_linear_config import TiledProduct, grid_of
from graphkit.ops.kernels.quantized_numbers import (
    float8_numbers,
    nibble_ptx,
    nibble_units,
    nibbles,
    nibbles_by_ptx,
    of_block,
    scale_row,
)
from graphkit.ops.quantized_layout import BLOCK


@triton.jit
def _add_block(
    total, numbers, x, factor, IS_SCALED: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """Return a sum plus the products of a block, times their factor if IS_SCALED holds.

    As ``add_block`` of ``streamed_tile.py``, which Triton cannot call.
    """
    if IS_SCALED:
        total = tl.fma(tl.dot(numbers, x, input_precision=PRECISION), factor, total)
    else:
        total = tl.dot(numbers, x, total, input_precision=PRECISION)
    return total


@triton.jit
def prefetch(address):
    """Request memory into the L2 cache, without waiting. No value is read."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [address.to(tl.int64)], tl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def tile_sums(
    x, inputs, row, scale, zero_point, row_of_scale, is_n, is_t, first,
    K: tl.constexpr, ROW: tl.constexpr, IS_PACKED: tl.constexpr, SCALE_COLUMNS: tl.constexpr,
    STEPS: tl.constexpr, ALL_K: tl.constexpr, SCALES_BLOCKS: tl.constexpr,
    PRECISION: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, PACK: tl.constexpr,
    UNROLL: tl.constexpr, STRIDE: tl.constexpr, STAGES: tl.constexpr, SUMS: tl.constexpr,
    LINE_STEPS: tl.constexpr,
):  # fmt: skip
    """Return the products of a tile of outputs and rows over STEPS steps from ``first`` on.

    ``row`` points to the outputs of the weight, [N], and ``inputs`` to the first 128 inputs of the
    rows, [128, T]. Numbers of an output are STRIDE elements apart. ALL_K tells that each step has
    all of its inputs. STAGES are the steps in flight; None selects those of the kernel. LINE_STEPS
    steps are a line of a weight, and every SUMS-th line belongs to a sum of its own.

    Products lack the scale of an output that has one, unless SCALES_BLOCKS.
    """
    place = row_of_scale * SCALE_COLUMNS
    STEP_BLOCKS: tl.constexpr = 2 if IS_PACKED else 1
    STEP_INPUTS: tl.constexpr = STEP_BLOCKS * 128
    one_factor, one_zero = None, None
    if SCALE_COLUMNS == 1:
        one_factor = of_block(scale, row_of_scale, 0, is_n, 1, True).to(tl.float32)
        if zero_point is not None:
            one_zero = of_block(zero_point, row_of_scale, 0, is_n, 1, True)
    lane = tl.arange(0, 128)
    numbers = row[:, None] + lane[None, :] * STRIDE
    SUM_STEPS: tl.constexpr = STEPS // SUMS
    total = tl.zeros([row.shape[0], inputs.shape[1]], tl.float32)
    whole = total
    for index in tl.range(0, STEPS, num_stages=STAGES, loop_unroll_factor=UNROLL):
        step = first + index
        if SUMS > 1:
            own_line = index % SUM_STEPS // LINE_STEPS * SUMS + index // SUM_STEPS
            step = first + own_line * LINE_STEPS + index % LINE_STEPS
        at = step * STEP_INPUTS + lane
        is_number, is_input, is_high_input = is_n[:, None], is_t[None, :], is_t[None, :]
        if not ALL_K:
            is_number = is_number & (step * 128 + lane < ROW)[None, :]
            is_input = is_input & (at < K)[:, None]
            is_high_input = is_high_input & (at + 128 < K)[:, None]
        loaded = tl.load(numbers + step * 128 * STRIDE, mask=is_number, other=0)
        low_inputs = tl.load(inputs + step * STEP_INPUTS, mask=is_input, other=0.0)
        column = step * STEP_BLOCKS
        factor, zero = one_factor, one_zero
        if SCALE_COLUMNS > 1:
            factor = of_block(scale, place, column, is_n, SCALE_COLUMNS, ALL_K).to(tl.float32)
            if zero_point is not None:
                zero = of_block(zero_point, place, column, is_n, SCALE_COLUMNS, ALL_K)
        if IS_PACKED:
            high_inputs = tl.load(inputs + step * STEP_INPUTS + 128, mask=is_high_input, other=0.0)
            high_factor, high_zero = factor, zero
            if SCALE_COLUMNS > 1:
                high_factor = of_block(scale, place, column + 1, is_n, SCALE_COLUMNS, ALL_K)
                high_factor = high_factor.to(tl.float32)
                if zero_point is not None:
                    high_zero = of_block(zero_point, place, column + 1, is_n, SCALE_COLUMNS, ALL_K)
            # The first block is multiplied before the second is converted, to save registers.
            if LOW is not None:
                low = nibbles_by_ptx(loaded, zero, x, LOW, PACK)
                total = _add_block(total, low, low_inputs, factor, SCALES_BLOCKS, PRECISION)
                high = nibbles_by_ptx(loaded, high_zero, x, HIGH, PACK)
            else:
                if zero_point is None:
                    zero = tl.full([row.shape[0], 1], 8, tl.uint8)
                    high_zero = zero
                low = nibbles(loaded, zero, x.dtype.element_ty, 0)
                total = _add_block(total, low, low_inputs, factor, SCALES_BLOCKS, PRECISION)
                high = nibbles(loaded, high_zero, x.dtype.element_ty, 4)
            total = _add_block(total, high, high_inputs, high_factor, SCALES_BLOCKS, PRECISION)
        else:
            wide = loaded
            if loaded.dtype == tl.uint8:
                wide = float8_numbers(loaded, x.dtype.element_ty)
            total = _add_block(total, wide, low_inputs, factor, SCALES_BLOCKS, PRECISION)
        if SUMS > 1:  # noqa: SIM102 - the compiler knows this, the program the next
            if (index + 1) % SUM_STEPS == 0:
                # No plain addition: of a sum of one step, Triton 3.6 would make the sum of the
                # product (its pass "combine"), which rounds after each instruction.
                whole = tl.fma(total, 1.0, whole)
                total = tl.zeros([row.shape[0], inputs.shape[1]], tl.float32)
    if SUMS > 1:
        total = whole
    if LOW is not None:
        total *= nibble_units(x.dtype.element_ty)
    return total


@triton.jit(do_not_specialize=["rows"])
def linear_kernel(
    out, x, weight, scale, zero_point, bias, rows,
    N: tl.constexpr, K: tl.constexpr, ROW: tl.constexpr, IS_PACKED: tl.constexpr,
    SCALE_ROWS: tl.constexpr, SCALE_COLUMNS: tl.constexpr, STEPS: tl.constexpr,
    STARTS_EARLY: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, EARLY_BYTES: tl.constexpr,
    LOW: tl.constexpr, HIGH: tl.constexpr, PACK: tl.constexpr, UNROLL: tl.constexpr,
    IS_GATED: tl.constexpr, SUMS: tl.constexpr, LINE_STEPS: tl.constexpr,
    SCALES_BLOCKS: tl.constexpr,
):  # fmt: skip
    """One program per tile of outputs, tile of rows and part of the inputs, of STEPS steps.

    A row of the weight has ROW elements: numbers, or bytes of two. Without ``scale``, SCALE_ROWS
    and SCALE_COLUMNS are 0. A tile of a gated product has outputs of the gate, then those of the up
    projection at the same places. SCALES_BLOCKS tells whether blocks are scaled, or sums, or no
    scales are there. LINE_STEPS steps are a line of a weight, and every SUMS-th
    line of a part belongs to a sum of its own, as for kernels that stream the weight.
    """
    n = tl.arange(0, BLOCK_N)
    HALF: tl.constexpr = BLOCK_N // 2
    if IS_GATED:
        n = tl.program_id(0) * HALF + n % HALF + n // HALF * (N // 2)
    else:
        n += tl.program_id(0) * BLOCK_N
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    first = tl.program_id(2) * STEPS
    STEP_BLOCKS: tl.constexpr = 2 if IS_PACKED else 1
    STEP_INPUTS: tl.constexpr = STEP_BLOCKS * 128
    # Conditions that always hold are left out of the loop, where they cost as much as products.
    ALL_N: tl.constexpr = N % BLOCK_N == 0
    ALL_K: tl.constexpr = K % (STEPS * STEP_INPUTS) == 0
    is_n, is_t = tl.full([BLOCK_N], True, tl.int1) if ALL_N else n < N, t < rows
    row = weight + n.to(tl.int64) * ROW
    row_of_scale = scale_row(n, N, SCALE_ROWS)
    place = row_of_scale * SCALE_COLUMNS
    if STARTS_EARLY:
        # The weight does not depend on the kernel before this one. Its first bytes are requested
        # while that kernel runs.
        if EARLY_BYTES and ALL_N and ALL_K:
            LINE: tl.constexpr = 1024 // weight.dtype.element_ty.primitive_bitwidth  # 128 bytes
            line = tl.arange(0, EARLY_BYTES // 128) * LINE
            prefetch(row[:, None] + first * 128 + tl.minimum(line, STEPS * 128 - 1)[None, :])
            if SCALE_COLUMNS > 1:
                prefetch(scale + place + first * STEP_BLOCKS)
                if zero_point is not None:
                    prefetch(zero_point + place + first * STEP_BLOCKS)
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    inputs = x + t.to(tl.int64)[None, :] * K + tl.arange(0, 128)[:, None]
    total = tile_sums(
        x, inputs, row, scale, zero_point, row_of_scale, is_n, is_t, first, K, ROW, IS_PACKED,
        SCALE_COLUMNS, STEPS, ALL_K, SCALES_BLOCKS, PRECISION, LOW, HIGH, PACK, UNROLL, 1, None,
        SUMS, LINE_STEPS,
    )  # fmt: skip
    added = tl.zeros([BLOCK_N], tl.float32)
    if bias is not None:  # noqa: SIM102 - the compiler knows this, the program the next
        if first == 0:
            added = tl.load(bias + n, mask=is_n, other=0.0).to(tl.float32)
    if SCALE_COLUMNS == 1 and not SCALES_BLOCKS:  # as ``store_tile`` of ``streamed_tile.py``
        factor = of_block(scale, row_of_scale, 0, is_n, 1, True).to(tl.float32)
        total = tl.fma(total, factor, added[:, None])
    elif bias is not None:
        total += added[:, None]
    result = total.to(out.dtype.element_ty)
    if IS_GATED:
        halves = tl.permute(tl.reshape(result, [2, HALF, BLOCK_T]), (1, 2, 0))
        gate, up = tl.split(halves)
        column = tl.program_id(0) * HALF + tl.arange(0, HALF)
        places = t.to(tl.int64)[None, :] * (N // 2) + column[:, None]
        is_place = (column < N // 2)[:, None] & is_t[None, :]
        tl.store(out + places, gated(gate, up), mask=is_place)
    else:
        part = tl.program_id(2).to(tl.int64) * rows * N
        places = part + t.to(tl.int64)[None, :] * N + n[:, None]
        tl.store(out + places, result, mask=is_n[:, None] & is_t[None, :])


def launch_tiles(
    args: Any, product: TiledProduct, parts: torch.Tensor, x: torch.Tensor, is_gated: bool,
    weight: dict[str, Any],
) -> None:  # fmt: skip
    """Write the parts of a product by ``linear_kernel``.

    The arguments are those of ``launch_streamed``.
    """
    low, high = None, None
    if weight["IS_PACKED"]:
        low, high = nibble_code(x, product, args.zero_point is not None)
    launch(
        linear_kernel, grid_of(product, len(x), weight["N"]), args, out=parts, x=x, rows=len(x),
        STEPS=triton.cdiv(weight["ROW"], BLOCK * product.line_steps * product.splits)
        * product.line_steps,
        IS_GATED=is_gated, SUMS=product.sums, LINE_STEPS=product.line_steps,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        BLOCK_N=product.outputs, BLOCK_T=product.rows, EARLY_BYTES=product.early_bytes,
        LOW=low, HIGH=high, PACK=product.pack, UNROLL=product.unroll,
        num_warps=product.num_warps, num_stages=product.num_stages, **weight,
    )  # fmt: skip


def nibble_code(
    x: torch.Tensor, product: TiledProduct, has_zeros: bool
) -> tuple[str | None, str | None]:
    """Return ``nibble_ptx`` for a product with rows; ``None`` where it does not convert."""
    if not isinstance(linear_kernel, triton.JITFunction):
        return None, None  # Triton's interpreter runs no PTX
    if x.dtype == torch.float16 or (x.dtype == torch.bfloat16 and has_bfloat16_fma(x.device)):
        return nibble_ptx(x.dtype, product.pack, has_zeros)
    return None, None
