"""Comparing two outputs of the same batch."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from graphkit.records import Mismatch

_UNITS = 64
"""Roundings that may pile up between two kernels that add in another order."""


def tolerance(expected: Mapping[str, torch.Tensor]) -> float:
    """Largest difference to expect of another kernel: a few roundings of the largest value."""
    return max(
        _UNITS * torch.finfo(tensor.dtype).eps * max(1.0, float(tensor.float().abs().max()))
        for tensor in expected.values()
        if tensor.is_floating_point()
    )


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
        difference = _difference(tensor, got[name]).flatten(1)
        rows = (difference > allowed).any(1).nonzero()
        if rows.numel():
            row = int(rows[0])
            column = int(difference[row].argmax())
            return Mismatch(
                field=name,
                row=row,
                request=row // tokens_per_request,
                expected=float(tensor.flatten(1)[row, column]),
                got=float(got[name].flatten(1)[row, column]),
            )
    return None


def _difference(expected: torch.Tensor, got: torch.Tensor) -> torch.Tensor:
    a, b = expected.double(), got.double()
    same = (a == b) | (a.isnan() & b.isnan())
    return torch.where(same, 0.0, (a - b).abs().nan_to_num(nan=torch.inf))
