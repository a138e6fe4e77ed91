"""Products as tensor cores add them: 16 inputs at once, in one rounding, group after group."""

from __future__ import annotations

import torch

INPUTS = 16
"""Inputs of an instruction of sm_90 for operands of 16 bits, of a warp or a warpgroup."""


def multiply(left: torch.Tensor, right: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Return ``total + left @ right`` in float32, [..., N, T] from [..., N, K] and [..., K, T]."""
    for first in range(0, left.shape[-1], INPUTS):
        some = slice(first, first + INPUTS)
        product = left[..., some].double() @ right[..., some, :].double()
        total = (total.double() + product).float()
    return total


def fma(value: torch.Tensor, other: torch.Tensor, summand: torch.Tensor) -> torch.Tensor:
    """Return ``value * other + summand`` in float32, in one rounding."""
    return (value.double() * other.double() + summand.double()).float()
