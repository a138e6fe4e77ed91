"""Products of more rows with a quantised weight that streams through shared memory, for CUDA.

The ring of stages is that of ``streamed_linear.py``. The instructions of a warpgroup (``wgmma`` of
sm_90) read the rows from shared memory, once for 64 outputs, and converted numbers from registers:
a thread takes pairs of bytes of the weight from shared memory. Each product is waited for, since
Triton does not keep the registers of an operand while an asynchronous product reads them.

A stage has 128 inputs of all rows, which take more memory than the weight: whole lines of a weight
of eight bits, and halves of lines of four bits, whose bytes have inputs that are 128 apart.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma

from graphkit.ops.kernels.gluon_launch import gdc_launch_dependents, gdc_wait
from graphkit.ops.kernels.streamed_tile import (
    add_block,
    barriers,
    float8_numbers,
    group_values,
    layout_of_lines,
    nibbles,
    output_at,
    request,
    request_early,
    request_lines,
    request_rest,
    scale_row,
    stages_of,
    store_tile,
    stored_table,
    zero_offset,
)


@gluon.jit(do_not_specialize=["rows"])
def streamed_warpgroup_kernel(
    out, x, weight, scale, zero_point, bias, rows,
    N: gl.constexpr, BITS: gl.constexpr, SCALE_ROWS: gl.constexpr, SCALE_COLUMNS: gl.constexpr,
    STEPS: gl.constexpr, STARTS_EARLY: gl.constexpr, OUTPUTS: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_T: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr, LOW: gl.constexpr,
    HIGH: gl.constexpr, IS_GATED: gl.constexpr, WARPS: gl.constexpr, EARLY: gl.constexpr,
    IN_FLIGHT: gl.constexpr, SUMS: gl.constexpr, SCALES_BLOCKS: gl.constexpr,
):  # fmt: skip
    """One program per OUTPUTS outputs, tile of rows and part of the inputs, of STEPS lines.

    Every SUMS-th line belongs to a sum of its own, of up to four, as the lines of a step of
    ``streamed_linear_kernel``, which has the other parameters. STAGES is at most the stages of a
    part and one more.
    """
    BLOCKS: gl.constexpr = 8 // BITS  # of 128 inputs, in a line
    PIECES: gl.constexpr = BLOCKS  # of a line, each a stage
    HAS_GROUPS: gl.constexpr = SCALE_COLUMNS > 1
    UNITS: gl.constexpr = 64 if x.dtype == gl.bfloat16 else 512  # ``nibble_units``
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_T, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    NBYTES: gl.constexpr = weight.block_type.nbytes + x.block_type.nbytes  # of a stage
    ready = barriers(STAGES + max(0, EARLY - IN_FLIGHT))
    boxes, row_boxes = stages_of(weight, STAGES), stages_of(x, STAGES)
    lines = boxes._reinterpret(
        gl.uint8, [STAGES, BLOCK_N, 128 // PIECES],
        layout_of_lines(None, BLOCK_N, 128 // PIECES, IS_GATED),
    )  # fmt: skip
    inputs = row_boxes._reinterpret(
        x.dtype, [STAGES * BLOCKS, BLOCK_T, 128 // PIECES], gl.NVMMASharedLayout(128, 16, 2)
    )
    first = gl.program_id(2) * STEPS

    zero = None
    if HAS_GROUPS:
        begin = first * BLOCKS
        scales = group_values(
            scale, begin, N, SCALE_ROWS, SCALE_COLUMNS, OUTPUTS, BLOCK_N, GROUPS, BLOCKS, 1, WARPS,
            IS_GATED,
        )  # fmt: skip
        if zero_point is not None:
            points = group_values(
                zero_point, begin, N, SCALE_ROWS, SCALE_COLUMNS, OUTPUTS, BLOCK_N, GROUPS, BLOCKS,
                1, WARPS, IS_GATED,
            )  # fmt: skip
    else:
        row = output_at(gl.arange(0, BLOCK_N, gl.SliceLayout(1, mma)), N, OUTPUTS, IS_GATED)
        factor = gl.load(scale + scale_row(row, N, SCALE_ROWS)).to(gl.float32)[:, None]
        if zero_point is not None:
            row = output_at(gl.arange(0, BLOCK_N, gl.SliceLayout(1, left)), N, OUTPUTS, IS_GATED)
            point = gl.load(zero_point + scale_row(row, N, SCALE_ROWS))
            zero = zero_offset(point, x, UNITS)[:, None]

    request_early(weight, boxes, ready, first, NBYTES, STAGES, EARLY, IN_FLIGHT, 1, PIECES)
    if HAS_GROUPS:
        factors = stored_table(scales, 1)
        if zero_point is not None:
            zeros = stored_table(zero_offset(points, x, UNITS), 1)
    if STARTS_EARLY:
        gdc_launch_dependents()
        gdc_wait()

    first_row = gl.program_id(1) * BLOCK_T
    request_rest(
        weight, x, boxes, row_boxes, ready, first, first_row, NBYTES, STAGES, EARLY, IN_FLIGHT, 1,
        PIECES,
    )  # fmt: skip
    none = gl.zeros([BLOCK_N, BLOCK_T], gl.float32, mma)
    total, second, third, fourth = none, none, none, none
    held, phase, free = 0, 0, STAGES - 1
    for step in range(STEPS // SUMS):
        for own in gl.static_range(SUMS):
            lower, upper = none, none
            for piece in gl.static_range(PIECES):
                # Stage ``free`` is written again: its product has been waited for.
                ahead = (step * SUMS + own) * PIECES + piece + STAGES - 1
                line, ahead_piece = first + ahead // PIECES, ahead % PIECES
                is_stage = ahead < STEPS * PIECES
                barrier = ready.index(free)
                mbarrier.expect(barrier, NBYTES, pred=is_stage)
                byte = ahead_piece * 64
                request_lines(weight, line, byte, boxes.index(free), barrier, is_stage)
                place = [0, line, ahead_piece, first_row, 0]
                request(x, place, row_boxes.index(free), barrier, is_stage)
                mbarrier.wait(ready.index(held), phase)
                loaded = lines.index(held).load(left)
                block = (step * SUMS + own) * BLOCKS
                for part in gl.static_range(BLOCKS):
                    right = inputs.index(held * BLOCKS + part).permute((1, 0))
                    if BITS == 8:
                        numbers = float8_numbers(loaded, x)
                    else:
                        offset = zero
                        if HAS_GROUPS and zero_point is not None:
                            offset = zeros.index(block + part).permute((1, 0)).load(left)
                        numbers = nibbles(loaded, offset, x, HIGH if part else LOW, 2)
                    if not SCALES_BLOCKS:
                        if own == 0:
                            total = warpgroup_mma(numbers, right, total)
                        elif own == 1:
                            second = warpgroup_mma(numbers, right, second)
                        elif own == 2:
                            third = warpgroup_mma(numbers, right, third)
                        else:
                            fourth = warpgroup_mma(numbers, right, fourth)
                    elif part == 0:
                        lower = warpgroup_mma(numbers, right, lower, use_acc=piece > 0)
                    else:
                        upper = warpgroup_mma(numbers, right, upper, use_acc=piece > 0)
                free = held
                phase = gl.where(held == STAGES - 1, 1 - phase, phase)
                held = gl.where(held == STAGES - 1, 0, held + 1)
            if SCALES_BLOCKS:
                for part in gl.static_range(BLOCKS):
                    if HAS_GROUPS:
                        table = factors.index(block + part)
                        of_block = table.permute((1, 0)).load(mma).to(gl.float32)
                    else:
                        of_block = factor
                    added = upper if part else lower
                    if own == 0:
                        total = add_block(total, added, of_block)
                    elif own == 1:
                        second = add_block(second, added, of_block)
                    elif own == 2:
                        third = add_block(third, added, of_block)
                    else:
                        fourth = add_block(fourth, added, of_block)
    if SUMS > 1:
        total += second
    if SUMS > 2:
        total = total + third + fourth
    if BITS == 4:
        total *= UNITS
    if SCALES_BLOCKS:
        store_tile(out, total, None, bias, rows, N, OUTPUTS, IS_GATED, False)
    else:
        store_tile(out, total, factor, bias, rows, N, OUTPUTS, IS_GATED, False)
