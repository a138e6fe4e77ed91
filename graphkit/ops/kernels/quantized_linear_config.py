"""How ``quantized_linear`` runs: the one place that chooses."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton

from graphkit.ops.quantized_linear import blocks

MOST_ROWS = 256
"""Most rows of the kernel. More are limited by arithmetic, where cuBLAS over a dequantised weight
is faster: writing and reading that weight takes the time of the products of about 460 rows on an
H200 (five bytes per weight at 4.3 TB/s, two operations per weight and row at 790 TFLOP/s)."""
TILE = 32
"""Outputs of a program of up to 64 rows: 4 KiB of float8 numbers per block of inputs."""
PROGRAMS = 4
"""Programs of a multiprocessor. Each has 6 to 12 KiB in flight, and about 30 KiB per multiprocessor
hide the latency of memory."""
LEAST_BLOCKS = 4
"""Least blocks of inputs of a part: below that, adding the parts costs more than it saves."""


@dataclass(frozen=True, slots=True)
class Product:
    """How a launch divides its work.

    Attributes:
        outputs: Outputs of a program, a power of two, at least 16.
        rows: Rows of a program, a power of two, at least 16.
        splits: Parts of the inputs.
        num_warps: Warps of a program.
        num_stages: Blocks of inputs in flight in a program, the current one included.
    """

    outputs: int
    rows: int
    splits: int
    num_warps: int = 4
    num_stages: int = 4


def choose_product(
    rows: int, inputs: int, outputs: int, device: torch.device, dtype: torch.dtype
) -> Product | None:
    """Return how the kernel runs; ``None`` for a product over the dequantised weight.

    ``torch._scaled_mm`` is not among the choices: it multiplies float8 with float8, so that rows
    would be rounded to eight bits, too. The result of a row would then depend on how many rows run
    with it, since few rows are not rounded, and texts would depend on the batch.

    Args:
        rows: Rows of the batch.
        inputs: Inputs of the weight.
        outputs: Outputs of the weight.
        device: The device of the rows.
        dtype: The dtype of the rows.
    """
    if rows > MOST_ROWS or dtype == torch.float64:
        return None
    splits = choose_splits(inputs, outputs, PROGRAMS * _multiprocessors(device))
    is_small = rows <= 64
    return Product(
        outputs=TILE if is_small else 2 * TILE,
        rows=min(64, max(16, triton.next_power_of_2(rows))),
        splits=splits,
        # 16 outputs for each warp: with more warps, two convert the same numbers.
        num_warps=2 if is_small else 4,
        num_stages=2 if dtype == torch.float32 else 4,
    )


def choose_splits(inputs: int, outputs: int, programs: int) -> int:
    """Return the parts of the inputs that give so many programs; no part is empty."""
    most = max(1, blocks(inputs) // LEAST_BLOCKS)
    splits = min(most, max(1, programs // -(-outputs // TILE)))
    return -(-blocks(inputs) // -(-blocks(inputs) // splits))


@cache
def _multiprocessors(device: torch.device) -> int:
    """Return the multiprocessors of a device; 132, as an H200 has, for the interpreter."""
    if device.type != "cuda":
        return 132
    return torch.cuda.get_device_properties(device).multi_processor_count
