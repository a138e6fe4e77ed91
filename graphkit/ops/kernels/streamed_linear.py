"""Products of few rows with a quantised weight that streams through shared memory, for CUDA.

A program holds a tile of outputs by rows. Lines of 128 bytes of each output of its part of the
weight pass through a ring of stages in shared memory, with the same inputs of the rows, and the
stage that has arrived is multiplied. The first stages are requested while the kernel before it
runs, since the weight does not depend on that kernel. Few are in flight at a time
(``EARLY_BYTES``). Scales and zero points are read before, since they would wait behind the weight.

One thread requests a stage, by a descriptor of the weight and one of the rows (TMA of sm_90). A
barrier of the stage counts the bytes. The other threads only wait, convert and multiply.

Numbers are multiplied by the instructions of a warp. Each has 16 inputs of both operands, which may
hold them in any order, if both share it: a thread takes four consecutive bytes of an output from
shared memory, and the same inputs of its row. The layouts that Triton's compiler chooses take two
bytes at a time. More rows are multiplied by ``streamed_warpgroup.py``, which adds the same products
in the same order (``add_block``). If nothing has to add in that order, a thread takes 16 bytes at a
time: an instruction has inputs of 64.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

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
    sum_of_lines,
    zero_offset,
)


@gluon.jit
def _places(SIZE: gl.constexpr, layout: gl.constexpr):
    """Return the places of outputs along the second of three axes, [1, SIZE, 1]."""
    return gl.arange(0, SIZE, gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]


@gluon.jit
def _of_groups(table, block, layout: gl.constexpr):
    """Return the values of outputs, [LINES, N, 1], in the groups of a block of each line."""
    return table.index(block).load(gl.SliceLayout(2, layout))[:, :, None]


@gluon.jit
def _as_left(numbers, layout: gl.constexpr, WIDTH: gl.constexpr):
    """Return numbers, [LINES, N, K], as the left operand of a product, each in its thread.

    A thread has WIDTH consecutive inputs of each 4 WIDTH, which WIDTH / 4 instructions multiply.
    The operand's layout gives it two columns of each eight, so that input WIDTH t + 4 s + 2 h + e
    of 4 WIDTH is column 16 s + 8 h + 2 t + e.
    """
    shape: gl.constexpr = numbers.shape
    group: gl.constexpr = 4 * WIDTH
    parts = gl.reshape(numbers, [shape[0], shape[1], shape[2] // group, 4, WIDTH // 4, 2, 2])
    parts = gl.permute(parts, (0, 1, 2, 4, 5, 3, 6))
    return gl.convert_layout(gl.reshape(parts, shape), layout, assert_trivial=True)


@gluon.jit
def _as_right(inputs, layout: gl.constexpr, WIDTH: gl.constexpr):
    """Return inputs, [LINES, K, T], as the right operand, in the order of ``_as_left``."""
    shape: gl.constexpr = inputs.shape
    group: gl.constexpr = 4 * WIDTH
    parts = gl.reshape(inputs, [shape[0], shape[1] // group, 4, WIDTH // 4, 2, 2, shape[2]])
    parts = gl.permute(parts, (0, 1, 3, 4, 2, 5, 6))
    return gl.convert_layout(gl.reshape(parts, shape), layout, assert_trivial=True)


@gluon.constexpr_function
def _layout_of_block(lines, rows, is_spread):
    """Return the layout of a block of inputs in shared memory, [lines, rows, 128].

    A box of the rows has 64 inputs of all rows, swizzled over 128 bytes, then the other 64. If
    ``is_spread``, rows are in the order of ``row_at``: threads that take eight bytes of four rows
    at the same time then access all banks.
    """
    bits = [[0, 0, 1 << bit] for bit in range(6)]
    places = [2, 0, 1] if is_spread else [0, 1, 2]
    places += range(3, 8)
    for bit in range(rows.bit_length() - 1):
        bits += [[0, 1 << places[bit], 8 << bit if bit < 3 else 0]]
    bits += [[0, 0, 64]]
    bits += [[1 << bit, 0, 0] for bit in range(lines.bit_length() - 1)]
    return gl.SharedLinearLayout(bits, [], 1024)


@gluon.jit(do_not_specialize=["rows"])
def streamed_linear_kernel(
    out, x, weight, scale, zero_point, bias, rows,
    N: gl.constexpr, BITS: gl.constexpr, SCALE_ROWS: gl.constexpr, SCALE_COLUMNS: gl.constexpr,
    STEPS: gl.constexpr, STARTS_EARLY: gl.constexpr, OUTPUTS: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_T: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr, LOW: gl.constexpr,
    HIGH: gl.constexpr, IS_GATED: gl.constexpr, LINES: gl.constexpr, WARPS: gl.constexpr,
    EARLY: gl.constexpr, IN_FLIGHT: gl.constexpr, SCALES_BLOCKS: gl.constexpr,
    IN_ORDER: gl.constexpr,
):  # fmt: skip
    """One program per OUTPUTS outputs, tile of rows and part of the inputs, of STEPS steps.

    ``weight`` and ``x`` are descriptors, made by ``streamed_launch.py``. N is a multiple of
    OUTPUTS, and OUTPUTS of 16; BLOCK_N is the next power of two. A step multiplies LINES lines of
    each output, each line by WARPS / LINES warps. STAGES is at most STEPS + 1. The weight of EARLY
    stages, less than STAGES, is requested while the kernel before runs, with IN_FLIGHT of them in
    flight. GROUPS is a power of two, at least the groups of inputs of a part. SCALES_BLOCKS tells
    whether blocks are scaled, or sums. IN_ORDER is that of ``StreamedProduct``. Other parameters
    are those of ``linear_kernel``.
    """
    WIDTH: gl.constexpr = 4 if IN_ORDER else 16  # consecutive bytes of a thread, and inputs
    BLOCKS: gl.constexpr = 8 // BITS  # of 128 inputs, in a line
    HAS_GROUPS: gl.constexpr = SCALE_COLUMNS > 1
    TEAM: gl.constexpr = WARPS // LINES
    UNITS: gl.constexpr = 64 if x.dtype == gl.bfloat16 else 512  # ``nibble_units``
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [LINES, TEAM, 1], [1, 16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    loaded_left: gl.constexpr = gl.DotOperandLayout(0, mma, WIDTH)
    loaded_right: gl.constexpr = gl.DotOperandLayout(1, mma, WIDTH)
    NBYTES: gl.constexpr = weight.block_type.nbytes + x.block_type.nbytes  # of a stage
    ready = barriers(STAGES + max(0, EARLY - IN_FLIGHT))
    boxes, row_boxes = stages_of(weight, STAGES), stages_of(x, STAGES)
    lines = boxes._reinterpret(
        gl.uint8, [STAGES, LINES, BLOCK_N, 128], layout_of_lines(LINES, BLOCK_N, 128, IS_GATED)
    )
    inputs = row_boxes._reinterpret(
        x.dtype, [STAGES * BLOCKS, LINES, BLOCK_T, 128], _layout_of_block(LINES, BLOCK_T, IN_ORDER)
    )
    first = gl.program_id(2) * STEPS * LINES

    zero = None
    if HAS_GROUPS:
        begin = first * BLOCKS
        scales = group_values(
            scale, begin, N, SCALE_ROWS, SCALE_COLUMNS, OUTPUTS, BLOCK_N, GROUPS, BLOCKS, LINES,
            TEAM, IS_GATED,
        )  # fmt: skip
        if zero_point is not None:
            points = group_values(
                zero_point, begin, N, SCALE_ROWS, SCALE_COLUMNS, OUTPUTS, BLOCK_N, GROUPS, BLOCKS,
                LINES, TEAM, IS_GATED,
            )  # fmt: skip
    elif SCALES_BLOCKS:
        row = output_at(_places(BLOCK_N, mma), N, OUTPUTS, IS_GATED)
        of_blocks = gl.load(scale + scale_row(row, N, SCALE_ROWS)).to(gl.float32)
    else:
        summed: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(0, mma))
        row = output_at(gl.arange(0, BLOCK_N, summed), N, OUTPUTS, IS_GATED)
        factor = gl.load(scale + scale_row(row, N, SCALE_ROWS)).to(gl.float32)[:, None]
    if not HAS_GROUPS:  # noqa: SIM102 - the compiler knows this, the program the next
        if zero_point is not None:
            row = output_at(_places(BLOCK_N, loaded_left), N, OUTPUTS, IS_GATED)
            zero = zero_offset(gl.load(zero_point + scale_row(row, N, SCALE_ROWS)), x, UNITS)

    request_early(weight, boxes, ready, first, NBYTES, STAGES, EARLY, IN_FLIGHT, LINES, 1)
    if HAS_GROUPS:
        factors = stored_table(scales, LINES)
        if zero_point is not None:
            zeros = stored_table(zero_offset(points, x, UNITS), LINES)
    if STARTS_EARLY:
        gdc_launch_dependents()
        gdc_wait()

    first_row = gl.program_id(1) * BLOCK_T
    request_rest(
        weight, x, boxes, row_boxes, ready, first, first_row, NBYTES, STAGES, EARLY, IN_FLIGHT,
        LINES, 1,
    )  # fmt: skip
    none = gl.zeros([LINES, BLOCK_N, BLOCK_T], gl.float32, mma)
    total, held, phase, free = none, 0, 0, STAGES - 1
    for step in range(STEPS):
        # Stage ``free`` is written again: all threads have read it, in the step before.
        ahead = step + STAGES - 1
        begin, is_step = first + ahead * LINES, ahead < STEPS
        barrier = ready.index(free)
        mbarrier.expect(barrier, NBYTES, pred=is_step)
        request_lines(weight, begin, 0, boxes.index(free), barrier, is_step)
        request(x, [0, begin, 0, first_row, 0], row_boxes.index(free), barrier, is_step)
        mbarrier.wait(ready.index(held), phase)
        loaded = lines.index(held).load(loaded_left)
        for part in gl.static_range(BLOCKS):
            block_of_part = step * BLOCKS + part
            rest = inputs.index(held * BLOCKS + part).permute((0, 2, 1))
            rest = _as_right(rest.load(loaded_right), right, WIDTH)
            if BITS == 8:
                numbers = float8_numbers(loaded, x)
            else:
                offset = zero
                if HAS_GROUPS and zero_point is not None:
                    offset = _of_groups(zeros, block_of_part, loaded_left)
                numbers = nibbles(loaded, offset, x, HIGH if part else LOW, 4)
            numbers = _as_left(numbers, left, WIDTH)
            if SCALES_BLOCKS:
                if HAS_GROUPS:
                    of_block = _of_groups(factors, block_of_part, mma).to(gl.float32)
                else:
                    of_block = of_blocks
                total = add_block(total, mma_v2(numbers, rest, none), of_block)
            else:
                total = mma_v2(numbers, rest, total)
        free = held
        phase = gl.where(held == STAGES - 1, 1 - phase, phase)
        held = gl.where(held == STAGES - 1, 0, held + 1)
    total = sum_of_lines(total, IN_ORDER)
    if BITS == 4:
        total *= UNITS
    if SCALES_BLOCKS:
        store_tile(out, total, None, bias, rows, N, OUTPUTS, IS_GATED, IN_ORDER)
    else:
        store_tile(out, total, factor, bias, rows, N, OUTPUTS, IS_GATED, IN_ORDER)
