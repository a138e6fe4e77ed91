"""Parts of the kernels that stream a weight: tiles of outputs, waiting, and storing results.

These kernels are in Gluon, Triton's language with explicit layouts. It is experimental, and
Triton's interpreter does not run it: no other kernels use it. Checked on Triton 3.6.0 and 3.7.1.
``choose_product`` selects the kernel of ``tiled_linear.py`` wherever these cannot run.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


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
def store_tile(
    out, total, bias, rows, N: gl.constexpr, OUTPUTS: gl.constexpr, IS_GATED: gl.constexpr
):  # fmt: skip
    """Store the sum of a tile, with the bias in the first part and gated if IS_GATED holds."""
    mma: gl.constexpr = total.type.layout
    BLOCK_N: gl.constexpr = total.shape[0]
    BLOCK_T: gl.constexpr = total.shape[1]
    place = gl.arange(0, BLOCK_N, gl.SliceLayout(1, mma))
    n = output_at(place, N, OUTPUTS, IS_GATED)
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
