"""Products of few rows whose weight streams through shared memory, for CUDA.

A program holds a tile of outputs by rows. It copies its part of the weight into a ring of stages in
shared memory, a line of 128 bytes of each output per stage, and multiplies the stage that has
arrived. The first stages are requested while the kernel before it runs, since the weight does not
depend on that kernel. Scales and zero points are read then, too.

``streamed_linear_kernel`` multiplies quantised numbers by the instructions of a warp. Their
operands may hold the inputs in any order, if both share it: a thread takes 16 consecutive bytes of
an output from shared memory, and the same inputs of its row. The layouts that Triton's compiler
chooses take two bytes at a time.

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
def _output(place, N: gl.constexpr, BLOCK_N: gl.constexpr, IS_GATED: gl.constexpr):
    """Return the output at places of a tile.

    In a gated product, 8 outputs of the up projection follow 8 of the gate, so that a thread holds
    both factors of a result.
    """
    output = gl.program_id(0) * BLOCK_N + place
    if IS_GATED:
        first = gl.program_id(0) * (BLOCK_N // 2)
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
def _add_block(total, numbers, x, factors, block, HAS_FACTORS: gl.constexpr):
    """Return a sum plus the products of a block of inputs, times its scales if it has some."""
    if HAS_FACTORS:
        mma: gl.constexpr = total.type.layout
        factor = factors.index(block).load(gl.SliceLayout(1, mma)).to(gl.float32)
        none = gl.zeros(total.shape, gl.float32, mma)
        total += mma_v2(numbers, x, none) * factor[:, None]
    else:
        total = mma_v2(numbers, x, total)
    return total


@gluon.jit
def _store(out, total, bias, rows, N: gl.constexpr, IS_GATED: gl.constexpr):
    """Store the sum of a tile, with the bias in the first part and gated if IS_GATED holds."""
    mma: gl.constexpr = total.type.layout
    BLOCK_N: gl.constexpr = total.shape[0]
    BLOCK_T: gl.constexpr = total.shape[1]
    n = _output(gl.arange(0, BLOCK_N, gl.SliceLayout(1, mma)), N, BLOCK_N, IS_GATED)
    if bias is not None:  # noqa: SIM102 - the compiler knows this, the program the next
        if gl.program_id(2) == 0:
            total += gl.load(bias + n).to(gl.float32)[:, None]
    result = total.to(out.dtype.element_ty)
    t = gl.program_id(1) * BLOCK_T + gl.arange(0, BLOCK_T, gl.SliceLayout(0, mma))
    is_own = (t < rows)[None, :] & (n >= 0)[:, None]
    if IS_GATED:
        gate, up = _gates_and_ups(result)
        # As ``gated`` of ``graphkit.ops.kernels.decoder``, which Gluon cannot call.
        wide = gate.to(gl.float32)
        activated = (wide / (1.0 + gl.exp(-wide))).to(result.dtype)
        value = (activated.to(gl.float32) * up.to(gl.float32)).to(result.dtype)
        place, _ = _gates_and_ups(t[None, :] * (N // 2) + n[:, None])
        is_place, _ = _gates_and_ups(is_own)
        gl.store(out + place, value, mask=is_place)
    else:
        part = gl.program_id(2).to(gl.int64) * rows * N
        gl.store(out + part + t.to(gl.int64)[None, :] * N + n[:, None], result, mask=is_own)


@gluon.jit(do_not_specialize=["rows"])
def streamed_linear_kernel(
    out, x, weight, scale, zero_point, bias, rows,
    N: gl.constexpr, K: gl.constexpr, ROW: gl.constexpr, BITS: gl.constexpr,
    SCALE_ROWS: gl.constexpr, SCALE_COLUMNS: gl.constexpr, STEPS: gl.constexpr,
    STARTS_EARLY: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_T: gl.constexpr,
    STAGES: gl.constexpr, GROUPS: gl.constexpr, LOW: gl.constexpr, HIGH: gl.constexpr,
    IS_GATED: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """One program per tile of outputs, tile of rows and part of the inputs, of STEPS lines.

    N is a multiple of BLOCK_N, and the ROW bytes of an output are the lines of all parts. STAGES is
    at most STEPS + 1. GROUPS is a power of two, at least the groups of inputs of a part. Other
    parameters are those of ``linear_kernel``.
    """
    dtype: gl.constexpr = x.dtype.element_ty
    WIDTH: gl.constexpr = 16  # consecutive bytes of a thread, and as many inputs
    BLOCKS: gl.constexpr = 8 // BITS  # of 128 inputs, in a line
    INPUTS: gl.constexpr = BLOCKS * 128
    HAS_GROUPS: gl.constexpr = SCALE_COLUMNS > 1
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, WIDTH)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, WIDTH)
    copied: gl.constexpr = gl.BlockedLayout([1, WIDTH], [4, 8], [WARPS, 1], [1, 0])
    copied_x: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    lines = gl.allocate_shared_memory(
        gl.uint8, [STAGES, BLOCK_N, 128], gl.SwizzledSharedLayout(WIDTH, 1, 8, [1, 0])
    )
    inputs = gl.allocate_shared_memory(
        dtype, [STAGES * BLOCKS, BLOCK_T, 128], gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    )
    first = gl.program_id(2) * STEPS

    n = _output(gl.arange(0, BLOCK_N, gl.SliceLayout(1, copied)), N, BLOCK_N, IS_GATED)
    lane = gl.arange(0, 128, gl.SliceLayout(0, copied))
    line = weight + n.to(gl.int64)[:, None] * ROW + (first * 128 + lane)[None, :]
    for stage in gl.static_range(STAGES - 1):
        async_copy.async_copy_global_to_shared(lines.index(stage), line + stage * 128)
        async_copy.commit_group()
    factors, zeros, zero = None, None, None
    if HAS_GROUPS:
        spread: gl.constexpr = gl.BlockedLayout([1, 2], [32, 1], [WARPS, 1], [1, 0])
        table: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        of_group: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        row = _output(gl.arange(0, BLOCK_N, gl.SliceLayout(1, spread)), N, BLOCK_N, IS_GATED)
        row = _scale_row(row, N, SCALE_ROWS)
        group = first * BLOCKS + gl.arange(0, GROUPS, gl.SliceLayout(0, spread))
        place = row[:, None] * SCALE_COLUMNS + group[None, :]
        # Terms that always hold, here and below, give a mask the shape and layout of its tensor.
        is_group = (row >= 0)[:, None] & (group < SCALE_COLUMNS)[None, :]
        of_groups = gl.load(scale + place, mask=is_group, other=0.0)
        factors = gl.allocate_shared_memory(of_groups.dtype, [GROUPS, BLOCK_N], of_group)
        view = factors._reinterpret(of_groups.dtype, [GROUPS, BLOCK_N], table)
        view.store(gl.permute(of_groups, (1, 0)))
        if zero_point is not None:
            offsets = _zero_offset(gl.load(zero_point + place, mask=is_group, other=0), x)
            zeros = gl.allocate_shared_memory(dtype, [GROUPS, BLOCK_N], of_group)
            view = zeros._reinterpret(dtype, [GROUPS, BLOCK_N], table)
            view.store(gl.permute(offsets, (1, 0)))
    elif zero_point is not None:
        own = _output(gl.arange(0, BLOCK_N, gl.SliceLayout(1, left)), N, BLOCK_N, IS_GATED)
        zero = _zero_offset(gl.load(zero_point + _scale_row(own, N, SCALE_ROWS)), x)[:, None]
    if not HAS_GROUPS:
        m = _output(gl.arange(0, BLOCK_N, gl.SliceLayout(1, mma)), N, BLOCK_N, IS_GATED)
        factor = gl.load(scale + _scale_row(m, N, SCALE_ROWS)).to(gl.float32)
    if STARTS_EARLY:
        gdc_launch_dependents()
        gdc_wait()

    k = gl.arange(0, 128, gl.SliceLayout(0, copied_x))
    t = gl.program_id(1) * BLOCK_T + gl.arange(0, BLOCK_T, gl.SliceLayout(1, copied_x))
    block = x + t.to(gl.int64)[:, None] * K + (first * INPUTS + k)[None, :]
    is_t = (t < rows)[:, None] & (k >= 0)[None, :]
    for stage in gl.static_range(STAGES - 1):
        for part in gl.static_range(BLOCKS):
            async_copy.async_copy_global_to_shared(
                inputs.index(stage * BLOCKS + part), block + (stage * BLOCKS + part) * 128,
                mask=is_t,
            )  # fmt: skip
        async_copy.commit_group()
    total = gl.zeros([BLOCK_N, BLOCK_T], gl.float32, mma)
    for step in range(STEPS):
        async_copy.wait_group(STAGES - 2)
        held, ahead = step % STAGES, step + STAGES - 1
        loaded = lines.index(held).load(left)
        low_inputs = inputs.index(held * BLOCKS).permute((1, 0)).load(right)
        if BITS == 4:
            high_inputs = inputs.index(held * BLOCKS + 1).permute((1, 0)).load(right)
        # Stage ``free`` is written again: all threads have read it, in the step before.
        free = ahead % STAGES
        is_line = (lane * 0 + ahead < STEPS)[None, :]
        async_copy.async_copy_global_to_shared(lines.index(free), line + ahead * 128, mask=is_line)
        is_input = is_t & (k * 0 + ahead < STEPS)[None, :]
        for piece in gl.static_range(BLOCKS):
            async_copy.async_copy_global_to_shared(
                inputs.index(free * BLOCKS + piece), block + (ahead * BLOCKS + piece) * 128,
                mask=is_input,
            )  # fmt: skip
        async_copy.commit_group()
        if BITS == 4:
            low_zero, high_zero = zero, zero
            if zeros is not None:
                low_zero = zeros.index(step * 2).load(gl.SliceLayout(1, left))[:, None]
                high_zero = zeros.index(step * 2 + 1).load(gl.SliceLayout(1, left))[:, None]
            low = _nibbles(loaded, low_zero, x, LOW)
            total = _add_block(total, low, low_inputs, factors, step * 2, HAS_GROUPS)
            high = _nibbles(loaded, high_zero, x, HIGH)
            total = _add_block(total, high, high_inputs, factors, step * 2 + 1, HAS_GROUPS)
        else:
            # Through float32, as in ``linear_kernel``.
            wide = loaded.to(gl.float8e4nv, bitcast=True).to(gl.float32).to(dtype)
            total = _add_block(total, wide, low_inputs, factors, step, HAS_GROUPS)
    async_copy.wait_group(0)
    if not HAS_GROUPS:
        total *= factor[:, None]
    _store(out, total, bias, rows, N, IS_GATED)


@gluon.jit(do_not_specialize=["rows"])
def streamed_plain_kernel(
    out, x, weight, bias, rows, N: gl.constexpr, K: gl.constexpr, STEPS: gl.constexpr,
    STARTS_EARLY: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_T: gl.constexpr,
    STAGES: gl.constexpr, IS_GATED: gl.constexpr, WARPS: gl.constexpr,
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
    n = _output(gl.arange(0, BLOCK_N, gl.SliceLayout(1, copied)), N, BLOCK_N, IS_GATED)
    k = gl.arange(0, LINE, gl.SliceLayout(0, copied))
    line = weight + n.to(gl.int64)[:, None] * K + (first * LINE + k)[None, :]
    for stage in gl.static_range(STAGES - 2):
        async_copy.async_copy_global_to_shared(lines.index(stage), line + stage * LINE)
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
        async_copy.async_copy_global_to_shared(lines.index(free), line + ahead * LINE, mask=is_line)
        async_copy.async_copy_global_to_shared(
            inputs.index(free), block + ahead * LINE, mask=is_t & is_line
        )
        async_copy.commit_group()
        total = warpgroup_mma_wait(0, deps=[running])
        right = inputs.index(held).permute((1, 0))
        running = warpgroup_mma(lines.index(held), right, total, is_async=True)
    total = warpgroup_mma_wait(0, deps=[running])
    async_copy.wait_group(0)
    _store(out, total, bias, rows, N, IS_GATED)
