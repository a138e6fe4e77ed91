"""The layout of weights of eight and four bits, as ``quantized_linear`` reads them.

Dimensions: K inputs, N outputs. A block is 128 inputs or outputs.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

BLOCK = 128
"""Inputs or outputs that share a scale, if not all of a row or of the weight do."""

SYMMETRIC_ZERO = 8
"""The number of four bits that stands for 0 without zero points."""


def blocks(size: int) -> int:
    """Return the number of blocks that hold ``size`` inputs or outputs."""
    return -(-size // BLOCK)


def dequantized(
    weight: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    inputs: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return a quantised weight as numbers of a dtype, [N, K]; see ``quantized_linear``."""
    outputs = len(weight)
    numbers = weight.to(dtype)
    if weight.dtype == torch.uint8:
        halves = weight.view(outputs, -1, BLOCK // 2)
        both = torch.cat((halves & 15, halves >> 4), -1).flatten(1)[:, :inputs]
        zero = SYMMETRIC_ZERO if zero_point is None else _spread(zero_point, outputs, inputs)
        numbers = both.to(dtype) - zero
    return numbers * _spread(scale, outputs, inputs).to(dtype)


def packed_numbers(numbers: torch.Tensor) -> torch.Tensor:
    """Pack numbers of four bits, [N, K] uint8, as ``quantized_linear`` reads them."""
    rows, inputs = numbers.shape
    whole = pad(numbers, (0, blocks(inputs) * BLOCK - inputs))
    low, high = whole.view(rows, -1, 2, BLOCK // 2).unbind(2)
    return (low | high << 4).flatten(1)


def _spread(factors: torch.Tensor, outputs: int, inputs: int) -> torch.Tensor:
    """Return the factor of each number, or what broadcasts to it."""
    rows, columns = factors.shape
    if rows not in (1, outputs):
        factors = factors.repeat_interleave(BLOCK, 0)[:outputs]
    if columns > 1:
        factors = factors.repeat_interleave(BLOCK, 1)[:, :inputs]
    return factors
