"""Comparing two outputs of the same batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch

from graphkit.records import Mismatch

Tensors = Mapping[str, torch.Tensor]

_UNITS = 64
"""Roundings that may pile up between two kernels that add in another order."""


def tolerance(expected: Tensors) -> float:
    """Largest difference to expect of another kernel: a few roundings of the largest value."""
    return max((_roundings(tensor) for tensor in expected.values()), default=0.0)


def largest_difference(expected: Tensors, got: Tensors) -> float:
    """Largest absolute difference of any number; infinite if one side alone is NaN.

    Integers, which are tokens and places in a tree, have no size: they count as equal.
    """
    return max(
        (
            float(_difference(one, other).max())
            for _, one, other in _fields(expected, got)
            if one.is_floating_point()
        ),
        default=0.0,
    )


def first_difference(
    expected: Tensors,
    got: Tensors,
    allowed: float,
    owner: Callable[[int, int], int],
    relative: float = 0.0,
) -> Mismatch | None:
    """The first element, by row, that is not what it should be.

    Args:
        expected: The output to go by.
        got: The other one. A field that one of them lacks differs in every row.
        allowed: Largest difference of floating-point fields; others must be equal.
        owner: ``owner(row, rows)`` is the request that one of so many rows belongs to.
        relative: What they may differ by beyond that, as a part of the expected number.
    """
    for name, one, other in _fields(expected, got):
        difference = _difference(one, other)
        if one.is_floating_point():
            size = _rows(one).double().abs()
            difference = difference - allowed - relative * torch.where(size.isfinite(), size, 0.0)
        rows = (difference > 0).any(1).nonzero()
        if rows.numel():
            row = int(rows[0])
            column = int(difference[row].argmax())
            return Mismatch(
                field=name,
                row=row,
                request=owner(row, len(difference)),
                expected=float(_rows(one)[row, column]),
                got=float(_rows(other)[row, column]),
            )
    return None


def _fields(expected: Tensors, got: Tensors) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Each field of either; NaN stands for one that is not there."""
    for name in dict.fromkeys([*expected, *got]):
        one, other = expected.get(name), got.get(name)
        if one is None:
            one = _nothing_like(other)
        yield name, one, _nothing_like(one) if other is None else other


def _nothing_like(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None, "a field is there on one side"
    return torch.full_like(tensor, torch.nan, dtype=torch.float64)


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
