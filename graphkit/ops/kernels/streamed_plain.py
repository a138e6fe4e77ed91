"""Products of few rows with a weight of their dtype, which streams through shared memory, for CUDA.

A program holds a tile of outputs by rows. It copies its part of the weight into a ring of stages in
shared memory, one or two lines of 128 bytes of each output per stage, and multiplies the stage that
has arrived. The first stages are requested while the kernel before it runs, since the weight does
not depend on that kernel. Few are in flight at a time (``EARLY_BYTES``). Products run by the
instructions of a warpgroup (``wgmma`` of sm_90), which read both operands from shared memory.

All threads copy (``cp.async``): nothing is converted, so that they have time. A warp reads
consecutive bytes of few outputs at once, 128 for each line of a step.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from graphkit.ops.kernels.gluon_launch import gdc_launch_dependents, gdc_wait
from graphkit.ops.kernels.streamed_tile import output_at, store_tile


@gluon.jit(do_not_specialize=["rows"])
def streamed_plain_kernel(
    out, x, weight, bias, rows, N: gl.constexpr, K: gl.constexpr, STEPS: gl.constexpr,
    STARTS_EARLY: gl.constexpr, OUTPUTS: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_T: gl.constexpr, STAGES: gl.constexpr, IS_GATED: gl.constexpr, LINES: gl.constexpr,
    WARPS: gl.constexpr, IN_FLIGHT: gl.constexpr,
):  # fmt: skip
    """One program per OUTPUTS outputs, tile of rows and part of the inputs, of STEPS steps.

    A step multiplies LINES lines of each output. The weight of all stages is requested while the
    kernel before runs, with IN_FLIGHT of them in flight. Other parameters are those of
    ``streamed_linear_kernel``.
    """
    LINE: gl.constexpr = LINES * 64  # inputs of a step
    FILLED: gl.constexpr = min(STAGES, STEPS)  # stages before the first product
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_T, 16])
    copied: gl.constexpr = gl.BlockedLayout([1, 8], [4 // LINES, 8 * LINES], [WARPS, 1], [1, 0])
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    dtype: gl.constexpr = x.dtype.element_ty
    lines = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, LINE], shared)
    inputs = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_T, LINE], shared)
    first = gl.program_id(2) * STEPS
    place = gl.arange(0, BLOCK_N, gl.SliceLayout(1, copied))
    n = output_at(place, N, OUTPUTS, IS_GATED)
    k = gl.arange(0, LINE, gl.SliceLayout(0, copied))
    line = weight + n.to(gl.int64)[:, None] * K + (first * LINE + k)[None, :]
    is_n = (place < OUTPUTS)[:, None] & (k >= 0)[None, :]
    if STARTS_EARLY:
        gdc_launch_dependents()
    for stage in gl.static_range(FILLED):
        if stage >= IN_FLIGHT:
            async_copy.wait_group(IN_FLIGHT - 1)
        async_copy.async_copy_global_to_shared(lines.index(stage), line + stage * LINE, mask=is_n)
        async_copy.commit_group()
    if STARTS_EARLY:
        gdc_wait()
    t = gl.program_id(1) * BLOCK_T + gl.arange(0, BLOCK_T, gl.SliceLayout(1, copied))
    block = x + t.to(gl.int64)[:, None] * K + (first * LINE + k)[None, :]
    is_t = (t < rows)[:, None] & (k >= 0)[None, :]
    for stage in gl.static_range(FILLED):
        async_copy.async_copy_global_to_shared(inputs.index(stage), block + stage * LINE, mask=is_t)
        async_copy.commit_group()
    total = gl.zeros([BLOCK_N, BLOCK_T], gl.float32, mma)
    for step in range(STEPS):
        async_copy.wait_group(STAGES - 2)
        fence_async_shared()
        held, ahead = step % STAGES, step + STAGES - 1
        # Stage ``free`` is written again: all warps have waited for its product, one step before.
        free = ahead % STAGES
        if step > 0:
            is_line = (k * 0 + ahead < STEPS)[None, :]
            async_copy.async_copy_global_to_shared(
                lines.index(free), line + ahead * LINE, mask=is_n & is_line
            )
            async_copy.async_copy_global_to_shared(
                inputs.index(free), block + ahead * LINE, mask=is_t & is_line
            )
        async_copy.commit_group()
        right = inputs.index(held).permute((1, 0))
        running = warpgroup_mma(lines.index(held), right, total, is_async=True)
        total = warpgroup_mma_wait(0, deps=[running])
    async_copy.wait_group(0)
    store_tile(out, total, None, bias, rows, N, OUTPUTS, IS_GATED, False)
