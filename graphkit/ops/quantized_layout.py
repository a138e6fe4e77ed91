"""The layout of weights of eight and four bits, as ``quantized_linear`` reads them.

Dimensions: K inputs, N outputs. A block is 128 inputs or outputs.

Numbers of four bits are packed in pairs of blocks of inputs. A pair has 128 bytes in the row of an
output. Byte i has input i of the first block in its lower four bits, and input i of the second
block in its upper ones. A row has 128 * ceil(K / 256) bytes, also if the number of blocks is odd.
Inputs from K to the end of the last pair have the number 8. No result depends on it.
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


def pairs(size: int) -> int:
    """Return the number of pairs of blocks that hold ``size`` inputs of four bits."""
    return -(-size // (2 * BLOCK))


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
        zero = SYMMETRIC_ZERO if zero_point is None else _spread(zero_point, outputs, inputs)
        numbers = unpacked_numbers(weight, inputs).to(dtype) - zero
    return numbers * _spread(scale, outputs, inputs).to(dtype)


def unpacked_numbers(packed: torch.Tensor, inputs: int) -> torch.Tensor:
    """Return the numbers of four bits in packed rows, [N, K] uint8."""
    packed = packed.view(len(packed), -1, BLOCK)
    return torch.cat((packed & 15, packed >> 4), -1).flatten(1)[:, :inputs]


def packed_numbers(numbers: torch.Tensor) -> torch.Tensor:
    """Pack numbers of four bits, [N, K] uint8, as ``quantized_linear`` reads them."""
    rows, inputs = numbers.shape
    padding = pairs(inputs) * 2 * BLOCK - inputs
    whole = pad(numbers, (0, padding), value=SYMMETRIC_ZERO)
    low, high = whole.view(rows, -1, 2, BLOCK).unbind(2)
    return (low | high << 4).flatten(1)


def _spread(factors: torch.Tensor, outputs: int, inputs: int) -> torch.Tensor:
    """Return the factor of each number, or what broadcasts to it."""
    rows, columns = factors.shape
    if rows not in (1, outputs):
        factors = factors.repeat_interleave(BLOCK, 0)[:outputs]
    if columns > 1:
        factors = factors.repeat_interleave(BLOCK, 1)[:, :inputs]
    return factors
