"""Root mean square normalisation for CUDA. Contract: ``graphkit.ops.rms_norm``."""

from typing import Any

import torch
import triton
import triton.language as tl

from graphkit.ops.kernels.launch import launch

MAX_BLOCK = 16384
"""Columns that a program holds at a time. Each row is read twice, the second time from a cache."""


@triton.jit
def normalised(x, scale, weight):
    """Return scaled values times their weights, each rounded to the dtype of ``x``."""
    y = (x.to(tl.float32) * scale).to(x.dtype)
    return (y.to(tl.float32) * weight.to(tl.float32)).to(x.dtype)


@triton.jit
def rms_norm_kernel(
    out, total, x, residual, weight, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, STARTS_EARLY: tl.constexpr,
):  # fmt: skip
    """One program per row; ``total`` and ``residual`` are both given or both None."""
    if STARTS_EARLY:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64) * WIDTH
    lane = tl.arange(0, BLOCK)
    squares = tl.zeros([BLOCK], tl.float32)
    for begin in tl.static_range(0, WIDTH, BLOCK):
        inside = begin + lane < WIDTH
        value = tl.load(x + row + begin + lane, mask=inside, other=0.0)
        if residual is not None:
            # A sum of two bf16 numbers is exact in float32 before it is rounded.
            before = tl.load(residual + row + begin + lane, mask=inside, other=0.0)
            value = (before.to(tl.float32) + value.to(tl.float32)).to(value.dtype)
            tl.store(total + row + begin + lane, value, mask=inside)
        wide = value.to(tl.float32)
        squares += wide * wide
    scale = tl.rsqrt(tl.sum(squares, 0) / WIDTH + eps)
    tl.debug_barrier()  # other threads may read the sums that a thread has written
    for begin in tl.static_range(0, WIDTH, BLOCK):
        inside = begin + lane < WIDTH
        source = x if residual is None else total
        value = tl.load(source + row + begin + lane, mask=inside, other=0.0)
        factor = tl.load(weight + begin + lane, mask=inside, other=0.0)
        tl.store(out + row + begin + lane, normalised(value, scale, factor), mask=inside)


def launch_rms_norm(given: Any) -> torch.Tensor:
    """Launch ``rms_norm``."""
    out: torch.Tensor = given.x.new_empty(given.x.shape)
    _launch(given, out=out, total=None, residual=None)
    return out


def launch_add_rms_norm(given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch ``add_rms_norm``."""
    out, total = given.x.new_empty(given.x.shape), given.x.new_empty(given.x.shape)
    _launch(given, out=out, total=total)
    return out, total


def _launch(given: Any, **others: Any) -> None:
    rows, width = given.x.shape
    block = min(MAX_BLOCK, triton.next_power_of_2(width))
    warps = min(16, max(1, block // 256))
    launch(rms_norm_kernel, (rows,), given, WIDTH=width, BLOCK=block, num_warps=warps, **others)
