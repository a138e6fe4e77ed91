"""Comparing two outputs of the same batch."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from graphkit.records import Mismatch

_UNITS = 64
"""Roundings that may pile up between two kernels that add in another order."""


def tolerance(expected: Mapping[str, torch.Tensor]) -> float:
    """Largest difference to expect of another kernel: a few roundings of the largest value."""
    return max((_roundings(tensor) for tensor in expected.values()), default=0.0)


def largest_difference(
    expected: Mapping[str, torch.Tensor], got: Mapping[str, torch.Tensor]
) -> float:
    """Largest absolute difference of any element; infinite if one side alone is NaN."""
    return max(float(_difference(expected[name], got[name]).max()) for name in expected)


def first_difference(
    expected: Mapping[str, torch.Tensor],
    got: Mapping[str, torch.Tensor],
    allowed: float,
    tokens_per_request: int,
) -> Mismatch | None:
    """The first element, by row, that differs by more than ``allowed``."""
    for name, tensor in expected.items():
        difference = _difference(tensor, got[name])
        rows = (difference > allowed).any(1).nonzero()
        if rows.numel():
            row = int(rows[0])
            column = int(difference[row].argmax())
            return Mismatch(
                field=name,
                row=row,
                request=row // tokens_per_request,
                expected=float(_rows(tensor)[row, column]),
                got=float(_rows(got[name])[row, column]),
            )
    return None


def _difference(expected: torch.Tensor, got: torch.Tensor) -> torch.Tensor:
    """Absolute difference of every element, [rows, columns]; infinite if one alone is NaN."""
    a, b = _rows(expected).double(), _rows(got).double()
    same = (a == b) | (a.isnan() & b.isnan())
    return torch.where(same, 0.0, (a - b).abs().nan_to_num(nan=torch.inf, posinf=torch.inf))


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(tensor.shape[0], -1)


def _roundings(tensor: torch.Tensor) -> float:
    if not tensor.is_floating_point():
        return 0.0
    values = tensor.float()
    largest = float(torch.where(values.isfinite(), values.abs(), 0.0).max())
    return _UNITS * torch.finfo(tensor.dtype).eps * max(1.0, largest)
