"""Products of few rows whose weight streams through shared memory, for CUDA.

A program holds a tile of outputs by rows. It copies its part of the weight into a ring of stages in
shared memory, a line of 128 bytes of each output per stage, and multiplies the stage that has
arrived. The first stages are requested while the kernel before it runs, since the weight does not
depend on that kernel. Scales and zero points are read then, too.

``streamed_linear_kernel`` multiplies quantised numbers by the instructions of a warp. Their
operands may hold the inputs in any order, if both share it: a thread takes 16 consecutive bytes of
an output from shared memory, and the same inputs of its row. The layouts that Triton's compiler
chooses take two bytes at a time. Scales are read before the weight is requested, behind which they
would wait.

``streamed_plain_kernel`` multiplies numbers of the dtype of the rows by the instructions of a
warpgroup (``wgmma`` of sm_90), which read both operands from shared memory. It does not serve
quantised numbers. These are converted in registers, and Triton reuses the registers of an operand
while an asynchronous product still reads them.

The kernels are written in Gluon, Triton's language with explicit layouts. Gluon is experimental,
and Triton's interpreter does not run it: this module alone uses it, checked on Triton 3.6.0 and
3.7.1. ``choose_product`` selects the kernel of ``quantized_linear.py`` wherever these cannot run.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)


@gluon.jit
def gdc_launch_dependents():
    """Let the next kernel start."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.b32 $0, 0;", "=r,r,~{memory}", [gl.program_id(0)],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def gdc_wait():
    """Wait until the kernel before has ended and its writes are visible."""
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; mov.b32 $0, 0;", "=r,r,~{memory}", [gl.program_id(0)],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _along(AXIS: gl.constexpr, SIZE: gl.constexpr, layout: gl.constexpr):
    """Return the places along one of three axes, with the other axes of size 1."""
    if AXIS == 0:
        place = gl.arange(0, SIZE, gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
    elif AXIS == 1:
        place = gl.arange(0, SIZE, gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    else:
        place = gl.arange(0, SIZE, gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    return place


@gluon.jit
def _output(place, N: gl.constexpr, OUTPUTS: gl.constexpr, IS_GATED: gl.constexpr):
    """Return the output at places of a tile; at those behind the last of the program, the last.

    In a gated product, 8 outputs of the up projection follow 8 of the gate, so that a thread holds
    both factors of a result.
    """
    place = gl.minimum(place, OUTPUTS - 1)
    output = gl.program_id(0) * OUTPUTS + place
    if IS_GATED:
        first = gl.program_id(0) * (OUTPUTS // 2)
        output = first + place % 8 + place // 16 * 8 + place // 8 % 2 * (N // 2)
    return output


@gluon.jit
def _scale_row(output, N: gl.constexpr, SCALE_ROWS: gl.constexpr):
    """Return the row of the scale of outputs."""
    row = output
    if SCALE_ROWS == 1:
        row = output * 0
    elif SCALE_ROWS != N:
        row = output // 128
    return row


@gluon.jit
def _zero_offset(zero, x):
    """Return what ``zero_offset`` of ``quantized_numbers.py`` does, which Gluon cannot call."""
    POWER: gl.constexpr = 0x4300 if x.dtype.element_ty == gl.bfloat16 else 0x6400
    return (zero.to(gl.int16) | POWER).to(x.dtype.element_ty, bitcast=True)


@gluon.jit
def _gates_and_ups(tile):
    """Return the gate's outputs of a gated tile, and those of the up projection."""
    parts = gl.reshape(tile, [tile.shape[0] // 16, 2, 8, tile.shape[1]])
    return gl.split(gl.permute(parts, (0, 2, 3, 1)))


@gluon.jit
def _float8_numbers(loaded, x):
    """Return what ``float8_numbers`` of ``quantized_numbers.py`` does, which Gluon cannot call."""
    return loaded.to(gl.float8e4nv, bitcast=True).to(gl.float32).to(x.dtype.element_ty)


@gluon.jit
def _nibbles(loaded, offset, x, PTX: gl.constexpr):
    """Return four bits of each byte less a zero point, by code of ``nibble_ptx``.

    ``offset`` is None for a zero point of 8.
    """
    dtype = x.dtype.element_ty
    if offset is None:
        number = gl.inline_asm_elementwise(
            PTX, "=&r,=&r,r", [loaded], dtype=dtype, is_pure=True, pack=4
        )
    else:
        loaded, offset = gl.broadcast(loaded, offset)
        number = gl.inline_asm_elementwise(
            PTX, "=&r,=&r,r,r,r", [loaded, offset], dtype=dtype, is_pure=True, pack=4
        )
    return number


@gluon.jit
def _stored_table(values, LINES: gl.constexpr):
    """Return the values of outputs and groups, [N, GROUPS], in shared memory, groups first.

    ``_of_groups`` reads it.
    """
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    shape: gl.constexpr = values.shape
    table = gl.allocate_shared_memory(values.dtype, [shape[1] // LINES, LINES, shape[0]], layout)
    rows = table._reinterpret(values.dtype, [shape[1], shape[0]], layout)
    rows.store(gl.permute(values, (1, 0)))
    return table


@gluon.jit
def _of_groups(table, block, layout: gl.constexpr):
    """Return the values of outputs, [LINES, N, 1], in the groups of a block of each line."""
    return table.index(block).load(gl.SliceLayout(2, layout))[:, :, None]


@gluon.jit
def _as_left(numbers, layout: gl.constexpr):
    """Return numbers, [LINES, N, K], as the left operand of a product, each in its thread.

    A thread has 16 consecutive inputs of each 64. The operand's layout gives it two columns of each
    eight, so that input 16 t + 4 s + 2 h + e of 64 is column 16 s + 8 h + 2 t + e.
    """
    shape: gl.constexpr = numbers.shape
    parts = gl.reshape(numbers, [shape[0], shape[1], shape[2] // 64, 4, 4, 2, 2])
    parts = gl.permute(parts, (0, 1, 2, 4, 5, 3, 6))
    return gl.convert_layout(gl.reshape(parts, shape), layout, assert_trivial=True)


@gluon.jit
def _as_right(inputs, layout: gl.constexpr):
    """Return inputs, [LINES, K, T], as the right operand, in the order of ``_as_left``."""
    shape: gl.constexpr = inputs.shape
    parts = gl.reshape(inputs, [shape[0], shape[1] // 64, 4, 4, 2, 2, shape[2]])
    parts = gl.permute(parts, (0, 1, 3, 4, 2, 5, 6))
    return gl.convert_layout(gl.reshape(parts, shape), layout, assert_trivial=True)


@gluon.jit
def _store(out, total, bias, rows, N: gl.constexpr, OUTPUTS: gl.constexpr, IS_GATED: gl.constexpr):
    """Store the sum of a tile, with the bias in the first part and gated if IS_GATED holds."""
    mma: gl.constexpr = total.type.layout
    BLOCK_N: gl.constexpr = total.shape[0]
    BLOCK_T: gl.constexpr = total.shape[1]
    place = gl.arange(0, BLOCK_N, gl.SliceLayout(1, mma))
    n = _output(place, N, OUTPUTS, IS_GATED)
    if bias is not None:  # noqa: SIM102 - the compiler knows this, the program the next
        if gl.program_id(2) == 0:
            total += gl.load(bias + n).to(gl.float32)[:, None]
    result = total.to(out.dtype.element_ty)
    t = gl.program_id(1) * BLOCK_T + gl.arange(0, BLOCK_T, gl.SliceLayout(0, mma))
    is_own = (t < rows)[None, :] & (place < OUTPUTS)[:, None]
    if IS_GATED:
        gate, up = _gates_and_ups(result)
        # As ``gated`` of ``graphkit.ops.kernels.decoder``, which Gluon cannot call.
        wide = gate.to(gl.float32)
        activated = (wide / (1.0 + gl.exp(-wide))).to(result.dtype)
        value = (activated.to(gl.float32) * up.to(gl.float32)).to(result.dtype)
        column, _ = _gates_and_ups(t[None, :] * (N // 2) + n[:, None])
        is_column, _ = _gates_and_ups(is_own)
        gl.store(out + column, value, mask=is_column)
    else:
        part = gl.program_id(2).to(gl.int64) * rows * N
        gl.store(out + part + t.to(gl.int64)[None, :] * N + n[:, None], result, mask=is_own)


@gluon.jit(do_not_specialize=["rows"])
def streamed_linear_kernel(
    out, x, weight, scale, zero_point, bias, rows,
    N: gl.constexpr, K: gl.constexpr, ROW: gl.constexpr, BITS: gl.constexpr,
    SCALE_ROWS: gl.constexpr, SCALE_COLUMNS: gl.constexpr, STEPS: gl.constexpr,
    STARTS_EARLY: gl.constexpr, OUTPUTS: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_T: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr, LOW: gl.constexpr,
    HIGH: gl.constexpr, IS_GATED: gl.constexpr, LINES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """One program per OUTPUTS outputs, tile of rows and part of the inputs, of STEPS steps.

    N is a multiple of OUTPUTS, and OUTPUTS of 16; BLOCK_N is the next power of two. The ROW bytes
    of an output are the lines of all parts. A step multiplies LINES lines of each output, each line
    by WARPS / LINES warps. STAGES is at most STEPS + 1. GROUPS is a power of two, at least the
    groups of inputs of a part. Other parameters are those of ``linear_kernel``.
    """
    dtype: gl.constexpr = x.dtype.element_ty
    WIDTH: gl.constexpr = 16  # consecutive bytes of a thread, and as many inputs
    BLOCKS: gl.constexpr = 8 // BITS  # of 128 inputs, in a line
    INPUTS: gl.constexpr = BLOCKS * 128  # of a line
    HAS_GROUPS: gl.constexpr = SCALE_COLUMNS > 1
    TEAM: gl.constexpr = WARPS // LINES
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [LINES, TEAM, 1], [1, 16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    loaded_left: gl.constexpr = gl.DotOperandLayout(0, mma, WIDTH)
    loaded_right: gl.constexpr = gl.DotOperandLayout(1, mma, WIDTH)
    copied: gl.constexpr = gl.BlockedLayout([1, 1, WIDTH], [1, 4, 8], [LINES, TEAM, 1], [2, 1, 0])
    copied_x: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 4, 8], [LINES, TEAM, 1], [2, 1, 0])
    lines = gl.allocate_shared_memory(
        gl.uint8, [STAGES, LINES, BLOCK_N, 128], gl.SwizzledSharedLayout(WIDTH, 1, 8, [2, 1, 0])
    )
    inputs = gl.allocate_shared_memory(
        dtype, [STAGES, LINES, BLOCK_T, INPUTS], gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0])
    )
    first = gl.program_id(2) * STEPS * LINES

    zero = None
    if HAS_GROUPS:
        WIDE: gl.constexpr = max(1, min(8, GROUPS // (2 * LINES)))
        spread: gl.constexpr = gl.BlockedLayout([1, WIDE], [16, 2], [TEAM, LINES], [1, 0])
        row = _output(gl.arange(0, BLOCK_N, gl.SliceLayout(1, spread)), N, OUTPUTS, IS_GATED)
        row = _scale_row(row, N, SCALE_ROWS)
        group = gl.arange(0, GROUPS, gl.SliceLayout(0, spread))
        if LINES > 1:  # the same block of all lines of a step, then the next block
            block_of_line, line_of_step = group // LINES, group % LINES
            group = (block_of_line // BLOCKS * LINES + line_of_step) * BLOCKS
            group += block_of_line % BLOCKS
        group += first * BLOCKS
        place = row[:, None] * SCALE_COLUMNS + group[None, :]
        # Terms that always hold, here and below, give a mask the shape and layout of its tensor.
        is_group = (row >= 0)[:, None] & (group < SCALE_COLUMNS)[None, :]
        scales = gl.load(scale + place, mask=is_group, other=0.0)
        if zero_point is not None:
            points = gl.load(zero_point + place, mask=is_group, other=0)
    else:
        row = _output(_along(1, BLOCK_N, mma), N, OUTPUTS, IS_GATED)
        factor = gl.load(scale + _scale_row(row, N, SCALE_ROWS)).to(gl.float32)
        if zero_point is not None:
            row = _output(_along(1, BLOCK_N, loaded_left), N, OUTPUTS, IS_GATED)
            zero = _zero_offset(gl.load(zero_point + _scale_row(row, N, SCALE_ROWS)), x)

    n = _output(_along(1, BLOCK_N, copied), N, OUTPUTS, IS_GATED)
    byte = (first + _along(0, LINES, copied)) * 128 + _along(2, 128, copied)
    line = weight + n.to(gl.int64) * ROW + byte
    is_n = (_along(1, BLOCK_N, copied) < OUTPUTS) & (byte >= 0)
    for stage in gl.static_range(STAGES - 1):
        async_copy.async_copy_global_to_shared(
            lines.index(stage), line + stage * LINES * 128, mask=is_n
        )
        async_copy.commit_group()
    if HAS_GROUPS:
        factors = _stored_table(scales, LINES)
        if zero_point is not None:
            zeros = _stored_table(_zero_offset(points, x), LINES)
    if STARTS_EARLY:
        gdc_launch_dependents()
        gdc_wait()

    t = gl.program_id(1) * BLOCK_T + _along(1, BLOCK_T, copied_x)
    k = (first + _along(0, LINES, copied_x)) * INPUTS + _along(2, INPUTS, copied_x)
    block = x + t.to(gl.int64) * K + k
    is_t = (t < rows) & (k >= 0)
    for stage in gl.static_range(STAGES - 1):
        async_copy.async_copy_global_to_shared(
            inputs.index(stage), block + stage * LINES * INPUTS, mask=is_t
        )
        async_copy.commit_group()
    none = gl.zeros([LINES, BLOCK_N, BLOCK_T], gl.float32, mma)
    total, held, free = none, 0, STAGES - 1
    line += (STAGES - 1) * LINES * 128
    block += (STAGES - 1) * LINES * INPUTS
    for step in range(STEPS):
        async_copy.wait_group(STAGES - 2)
        # Stage ``free`` is written again: all threads have read it, in the step before.
        left_steps = STEPS - (STAGES - 1) - step
        is_line = is_n & (byte * 0 < left_steps)
        async_copy.async_copy_global_to_shared(lines.index(free), line, mask=is_line)
        is_input = is_t & (k * 0 < left_steps)
        async_copy.async_copy_global_to_shared(inputs.index(free), block, mask=is_input)
        async_copy.commit_group()
        loaded = lines.index(held).load(loaded_left)
        for part in gl.static_range(BLOCKS):
            block_of_part = step * BLOCKS + part
            rest = inputs.index(held).slice(part * 128, 128, dim=2).permute((0, 2, 1))
            rest = _as_right(rest.load(loaded_right), right)
            if BITS == 8:
                numbers = _float8_numbers(loaded, x)
            else:
                offset = zero
                if HAS_GROUPS and zero_point is not None:
                    offset = _of_groups(zeros, block_of_part, loaded_left)
                numbers = _nibbles(loaded, offset, x, HIGH if part else LOW)
            numbers = _as_left(numbers, left)
            if HAS_GROUPS:
                of_groups = _of_groups(factors, block_of_part, mma).to(gl.float32)
                total += mma_v2(numbers, rest, none) * of_groups
            else:
                total = mma_v2(numbers, rest, total)
        line += LINES * 128
        block += LINES * INPUTS
        free = held
        held = gl.where(held == STAGES - 1, 0, held + 1)
    async_copy.wait_group(0)
    if not HAS_GROUPS:
        total *= factor
    _store(out, gl.sum(total, 0), bias, rows, N, OUTPUTS, IS_GATED)


@gluon.jit(do_not_specialize=["rows"])
def streamed_plain_kernel(
    out, x, weight, bias, rows, N: gl.constexpr, K: gl.constexpr, STEPS: gl.constexpr,
    STARTS_EARLY: gl.constexpr, OUTPUTS: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_T: gl.constexpr, STAGES: gl.constexpr, IS_GATED: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """As ``streamed_linear_kernel``, for a weight of the dtype of the rows.

    STAGES is at least 3, and at most STEPS + 2: a stage is written again when the product after its
    own has started.
    """
    LINE: gl.constexpr = 64  # inputs of 128 bytes
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_T, 16])
    copied: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    dtype: gl.constexpr = x.dtype.element_ty
    lines = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, LINE], shared)
    inputs = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_T, LINE], shared)
    first = gl.program_id(2) * STEPS
    place = gl.arange(0, BLOCK_N, gl.SliceLayout(1, copied))
    n = _output(place, N, OUTPUTS, IS_GATED)
    k = gl.arange(0, LINE, gl.SliceLayout(0, copied))
    line = weight + n.to(gl.int64)[:, None] * K + (first * LINE + k)[None, :]
    is_n = (place < OUTPUTS)[:, None] & (k >= 0)[None, :]
    for stage in gl.static_range(STAGES - 2):
        async_copy.async_copy_global_to_shared(lines.index(stage), line + stage * LINE, mask=is_n)
        async_copy.commit_group()
    if STARTS_EARLY:
        gdc_launch_dependents()
        gdc_wait()
    t = gl.program_id(1) * BLOCK_T + gl.arange(0, BLOCK_T, gl.SliceLayout(1, copied))
    block = x + t.to(gl.int64)[:, None] * K + (first * LINE + k)[None, :]
    is_t = (t < rows)[:, None] & (k >= 0)[None, :]
    for stage in gl.static_range(STAGES - 2):
        async_copy.async_copy_global_to_shared(inputs.index(stage), block + stage * LINE, mask=is_t)
        async_copy.commit_group()
    running = warpgroup_mma_init(gl.zeros([BLOCK_N, BLOCK_T], gl.float32, mma))
    for step in range(STEPS):
        async_copy.wait_group(STAGES - 3)
        fence_async_shared()
        held, ahead = step % STAGES, step + STAGES - 2
        # Stage ``free`` is written again: all warps have waited for its product, in the last step.
        free = ahead % STAGES
        is_line = (k * 0 + ahead < STEPS)[None, :]
        async_copy.async_copy_global_to_shared(
            lines.index(free), line + ahead * LINE, mask=is_n & is_line
        )
        async_copy.async_copy_global_to_shared(
            inputs.index(free), block + ahead * LINE, mask=is_t & is_line
        )
        async_copy.commit_group()
        total = warpgroup_mma_wait(0, deps=[running])
        right = inputs.index(held).permute((1, 0))
        running = warpgroup_mma(lines.index(held), right, total, is_async=True)
    total = warpgroup_mma_wait(0, deps=[running])
    async_copy.wait_group(0)
    _store(out, total, bias, rows, N, OUTPUTS, IS_GATED)
