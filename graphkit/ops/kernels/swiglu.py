"""The gate of a SwiGLU network for CUDA. Contract: ``graphkit.ops.swiglu``."""

from typing import Any

import torch
import triton
import triton.language as tl

from graphkit.ops.kernels.launch import launch

_BLOCK = 1024


@triton.jit
def silu_and_mul_kernel(
    out, gate_up, WIDTH: tl.constexpr, BLOCK: tl.constexpr, STARTS_EARLY: tl.constexpr
):
    """One program per row and block of columns."""
    if STARTS_EARLY:
        tl.extra.cuda.gdc_wait()
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    begin = gate_up + row * 2 * WIDTH + column
    gate = tl.load(begin, mask=inside, other=0.0)
    up = tl.load(begin + WIDTH, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    opened = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    product = (opened.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)
    tl.store(out + row * WIDTH + column, product, mask=inside)


def launch_silu_and_mul(given: Any) -> torch.Tensor:
    """Launch ``silu_and_mul``."""
    rows, columns = given.gate_up.shape
    width = columns // 2
    out: torch.Tensor = given.gate_up.new_empty(rows, width)
    block = min(_BLOCK, triton.next_power_of_2(width))
    grid = rows, triton.cdiv(width, block)
    launch(silu_and_mul_kernel, grid, given, out=out, WIDTH=width, BLOCK=block)
    return out
