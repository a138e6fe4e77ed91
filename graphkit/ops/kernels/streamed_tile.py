"""Parts of the kernels that stream a weight: stages, tiles of outputs, and numbers.

These kernels are in Gluon. ``choose_product`` selects the kernel of ``tiled_linear.py`` wherever
they cannot run.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma


@gluon.jit
def output_at(place, N: gl.constexpr, OUTPUTS: gl.constexpr, IS_GATED: gl.constexpr):
    """Return the output at each place of a tile. Places behind the last output repeat it.

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
def _gates_and_ups(tile):
    """Return the gate's outputs of a gated tile, and those of the up projection."""
    parts = gl.reshape(tile, [tile.shape[0] // 16, 2, 8, tile.shape[1]])
    return gl.split(gl.permute(parts, (0, 2, 3, 1)))


@gluon.jit
def row_at(place):
    """Return the row at each place of a tile whose layout in shared memory is spread.

    Four consecutive places have every second row of eight, whose inputs are in different banks.
    """
    return place // 8 * 8 + place % 4 * 2 + place // 4 % 2


@gluon.jit
def store_tile(
    out, total, factor, bias, rows, N: gl.constexpr, OUTPUTS: gl.constexpr, IS_GATED: gl.constexpr,
    IS_SPREAD: gl.constexpr,
):  # fmt: skip
    """Store the sum of a tile, with the bias in the first part and gated if IS_GATED holds.

    ``factor`` is the scale of each output, [N, 1], or None. A sum is scaled and the bias added with
    one rounding, so that no compiler decides it. Rows are in order, or as ``row_at`` has them if
    IS_SPREAD holds.
    """
    mma: gl.constexpr = total.type.layout
    BLOCK_N: gl.constexpr = total.shape[0]
    BLOCK_T: gl.constexpr = total.shape[1]
    place = gl.arange(0, BLOCK_N, gl.SliceLayout(1, mma))
    n = output_at(place, N, OUTPUTS, IS_GATED)
    added = gl.zeros([BLOCK_N], gl.float32, gl.SliceLayout(1, mma))
    if bias is not None:  # noqa: SIM102 - the compiler knows this, the program the next
        if gl.program_id(2) == 0:
            added = gl.load(bias + n).to(gl.float32)
    if factor is not None:
        total = gl.fma(total, factor, added[:, None])
    elif bias is not None:
        total += added[:, None]
    result = total.to(out.dtype.element_ty)
    t = gl.arange(0, BLOCK_T, gl.SliceLayout(0, mma))
    if IS_SPREAD:
        t = row_at(t)
    t += gl.program_id(1) * BLOCK_T
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


@gluon.jit
def add_block(total, block, factor):
    """Return a sum plus that of a block of 128 inputs times its scale, with one rounding.

    All row-invariant products with scales of blocks add these so, in the order of the inputs: the
    bits of a row do not depend on the kernel. Where an output has one scale, instructions add all
    inputs of a sum in order, and the result is scaled.
    """
    return gl.fma(block, factor, total)


@gluon.jit
def sum_of_lines(total, IN_ORDER: gl.constexpr):
    """Return the sums of all lines of a step, [LINES, N, T], added in order if IN_ORDER holds."""
    LINES: gl.constexpr = total.shape[0]
    if LINES <= 2 or not IN_ORDER:
        whole = gl.sum(total, 0)  # two numbers have one sum
    else:
        layout: gl.constexpr = gl.SliceLayout(0, total.type.layout)
        memory: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        rows: gl.constexpr = [LINES * total.shape[1], total.shape[2]]
        held = gl.allocate_shared_memory(gl.float32, total.shape, memory)
        held._reinterpret(gl.float32, rows, memory).store(gl.reshape(total, rows))
        whole = held.index(0).load(layout)
        for line in gl.static_range(1, LINES):
            whole += held.index(line).load(layout)
    return whole


@gluon.jit
def scale_row(output, N: gl.constexpr, SCALE_ROWS: gl.constexpr):
    """Return the row of the scale of outputs."""
    row = output
    if SCALE_ROWS == 1:
        row = output * 0
    elif SCALE_ROWS != N:
        row = output // 128
    return row


@gluon.jit
def zero_offset(zero, x, UNITS: gl.constexpr):
    """Return what ``zero_offset`` of ``quantized_numbers.py`` does, which Gluon cannot call."""
    return (zero.to(gl.float32) * (-1.0 / UNITS)).to(x.dtype)


@gluon.jit
def float8_numbers(loaded, x):
    """Return what ``float8_numbers`` of ``quantized_numbers.py`` does, which Gluon cannot call."""
    return loaded.to(gl.float8e4nv, bitcast=True).to(gl.float32).to(x.dtype)


@gluon.jit
def nibbles(loaded, offset, x, PTX: gl.constexpr, PACK: gl.constexpr):
    """Return four bits of each byte less a zero point, by code of ``nibble_ptx`` and in its units.

    ``offset`` is None for a zero point of 8. PACK is the number of bytes that the code converts.
    """
    dtype = x.dtype
    OUT: gl.constexpr = "=&r,h" if PACK == 2 else "=&r,=&r,r"
    if offset is None:
        number = gl.inline_asm_elementwise(PTX, OUT, [loaded], dtype=dtype, is_pure=True, pack=PACK)
    else:
        OFFSETS: gl.constexpr = ",r" if PACK == 2 else ",r,r"
        loaded, offset = gl.broadcast(loaded, offset)
        number = gl.inline_asm_elementwise(
            PTX, OUT + OFFSETS, [loaded, offset], dtype=dtype, is_pure=True, pack=PACK
        )
    return number


@gluon.constexpr_function
def layout_of_lines(lines, outputs, width, is_gated):
    """Return the layout in which ``weight_descriptor`` writes a stage to shared memory.

    The lines of an output come one after the other, as in memory. In a gated product, the outputs
    of the gate come before those of the up projection. Groups of 16 bytes are swizzled over 128
    bytes.

    Args:
        lines: Lines of a step. A stage is [lines, outputs, width], or [outputs, width] for None.
        outputs: Outputs of a program, padded.
        width: Bytes of a line, or of a piece of it.
        is_gated: Whether the kernel applies the gate.
    """
    outs = [1 << bit for bit in range(outputs.bit_length() - 1)]
    if is_gated:  # 8 outputs of the up projection follow 8 of the gate, see ``output_at``
        outs = outs[:3] + outs[4:] + outs[3:4]
    rows = [[1 << bit, 0] for bit in range((lines or 1).bit_length() - 1)]
    rows += [[0, each] for each in outs]
    bits = [[0, 0, 1 << bit] for bit in range(width.bit_length() - 1)]
    swizzle = 16 * width // 128
    for row in rows:
        bits.append([*row, swizzle if 16 <= swizzle < width else 0])
        swizzle *= 2
    return gl.SharedLinearLayout([each[lines is None :] for each in bits], [], 1024)


@gluon.jit
def stages_of(tensor, STAGES: gl.constexpr):
    """Return shared memory for the boxes of a tensor, one for each stage."""
    shape: gl.constexpr = [STAGES] + tensor.block_shape  # noqa: RUF005 - Gluon unpacks no list
    return gl.allocate_shared_memory(tensor.dtype, shape, tensor.layout)


@gluon.jit
def barriers(COUNT: gl.constexpr):
    """Return barriers, each of which ends a phase when the boxes that it expects have arrived.

    Create all barriers of a kernel by one call, and wait for one of them in its last step. Triton
    gives the memory of barriers to other tensors after the last use of any of them, which is
    undefined before ``mbarrier.inval`` (PTX ISA, "Operations on mbarrier objects").
    """
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(COUNT):
        mbarrier.init(made.index(place), count=1)
    return made


@gluon.jit
def request(tensor, place, box, barrier, is_step):
    """Request the box at a place of a tensor, if ``is_step``."""
    tma.async_copy_global_to_shared(tensor, place, barrier, box, pred=is_step)


@gluon.jit
def request_lines(weight, line, byte, box, barrier, is_step):
    """Request a program's outputs of a weight, from a line and a byte of it on, if ``is_step``."""
    request(weight, [0, gl.program_id(0), 0, line, byte], box, barrier, is_step)


@gluon.jit
def request_early(
    weight, boxes, ready, first, STAGE_BYTES: gl.constexpr, STAGES: gl.constexpr,
    EARLY: gl.constexpr, IN_FLIGHT: gl.constexpr, LINES: gl.constexpr, PIECES: gl.constexpr,
):  # fmt: skip
    """Request EARLY stages of a weight, with at most IN_FLIGHT of them in flight.

    ``ready`` has a barrier for each stage, and then one for the weight of each stage for whose
    arrival a request waits. The weight of other stages arrives together with the rows.
    """
    for stage in gl.static_range(EARLY):
        if stage >= IN_FLIGHT:
            mbarrier.wait(ready.index(STAGES + stage - IN_FLIGHT), 0)
        line, byte = first + stage // PIECES * LINES, stage % PIECES * (128 // PIECES)
        if stage < EARLY - IN_FLIGHT:
            barrier = ready.index(STAGES + stage)
            mbarrier.expect(barrier, weight.block_type.nbytes)
        else:
            barrier = ready.index(stage)
            mbarrier.expect(barrier, STAGE_BYTES)
        request_lines(weight, line, byte, boxes.index(stage), barrier, True)


@gluon.jit
def request_rest(
    weight, x, boxes, row_boxes, ready, first, first_row, STAGE_BYTES: gl.constexpr,
    STAGES: gl.constexpr, EARLY: gl.constexpr, IN_FLIGHT: gl.constexpr, LINES: gl.constexpr,
    PIECES: gl.constexpr,
):  # fmt: skip
    """Request the rows of all stages but the last, then the weight of those from EARLY on."""
    for stage in gl.static_range(STAGES - 1):
        if stage < EARLY - IN_FLIGHT:
            mbarrier.expect(ready.index(stage), x.block_type.nbytes)
        elif stage >= EARLY:
            mbarrier.expect(ready.index(stage), STAGE_BYTES)
        place = [0, first + stage // PIECES * LINES, stage % PIECES, first_row, 0]
        request(x, place, row_boxes.index(stage), ready.index(stage), True)
    for stage in gl.static_range(EARLY, STAGES - 1):
        line, byte = first + stage // PIECES * LINES, stage % PIECES * (128 // PIECES)
        request_lines(weight, line, byte, boxes.index(stage), ready.index(stage), True)


@gluon.jit
def group_values(
    values, begin, N: gl.constexpr, SCALE_ROWS: gl.constexpr, SCALE_COLUMNS: gl.constexpr,
    OUTPUTS: gl.constexpr, BLOCK_N: gl.constexpr, GROUPS: gl.constexpr, BLOCKS: gl.constexpr,
    LINES: gl.constexpr, TEAM: gl.constexpr, IS_GATED: gl.constexpr,
):  # fmt: skip
    """Return a value of each output of a tile and each group from ``begin`` on, [BLOCK_N, GROUPS].

    Groups are in the order in which steps multiply them: the same block of all LINES lines of a
    step, each of BLOCKS blocks, then the next block.
    """
    WIDE: gl.constexpr = max(1, min(8, GROUPS // (2 * LINES)))
    spread: gl.constexpr = gl.BlockedLayout([1, WIDE], [16, 2], [TEAM, LINES], [1, 0])
    row = output_at(gl.arange(0, BLOCK_N, gl.SliceLayout(1, spread)), N, OUTPUTS, IS_GATED)
    row = scale_row(row, N, SCALE_ROWS)
    group = gl.arange(0, GROUPS, gl.SliceLayout(0, spread))
    if LINES > 1:
        block_of_line, line_of_step = group // LINES, group % LINES
        group = (block_of_line // BLOCKS * LINES + line_of_step) * BLOCKS
        group += block_of_line % BLOCKS
    group += begin
    place = row[:, None] * SCALE_COLUMNS + group[None, :]
    # The first term always holds: it gives the mask the shape and layout of its tensor.
    is_group = (row >= 0)[:, None] & (group < SCALE_COLUMNS)[None, :]
    return gl.load(values + place, mask=is_group, other=0)


@gluon.jit
def stored_table(values, LINES: gl.constexpr):
    """Return the values of outputs and groups, [N, GROUPS], in shared memory, groups first.

    An index of a block of inputs gives those of each line, [LINES, N].
    """
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    shape: gl.constexpr = values.shape
    table = gl.allocate_shared_memory(values.dtype, [shape[1] // LINES, LINES, shape[0]], layout)
    rows = table._reinterpret(values.dtype, [shape[1], shape[0]], layout)
    rows.store(gl.permute(values, (1, 0)))
    return table
