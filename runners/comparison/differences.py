"""Comparison of two outputs of the same batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch

from graphkit.records import Mismatch
from graphkit.runners.comparison.rounding import Rounding

Tensors = Mapping[str, torch.Tensor]
Allowed = float | Callable[[torch.Tensor], torch.Tensor]
"""Largest difference of floating-point fields: ulp, or a function of the expected tensor."""
RowOwner = Callable[[int, int], int]
"""``owner(row, num_rows)`` is the request that a row belongs to."""


def even_owner(num_requests: int) -> RowOwner:
    """Return the row owner of an output in which every request has as many rows."""
    return lambda row, num_rows: row * num_requests // num_rows


def largest_difference(expected: Tensors, got: Tensors) -> float:
    """Return the largest absolute difference; infinite where only one side is NaN.

    Integers are token ids and indices, whose distance means nothing: they count as equal.
    """
    return max(
        (
            float(_difference(one, other).max())
            for _, one, other in _fields(expected, got)
            if one.is_floating_point()
        ),
        default=0.0,
    )


def largest_ulps(expected: Tensors, got: Tensors, rounding: Rounding) -> float:
    """Return the largest difference in ulp, as ``largest_difference`` compares."""
    return max(
        (
            float(_difference(one, other).max()) / rounding.ulp(one)
            for _, one, other in _fields(expected, got)
            if one.is_floating_point()
        ),
        default=0.0,
    )


def first_difference(
    expected: Tensors,
    got: Tensors,
    owner: RowOwner,
    rounding: Rounding,
    allowed: Allowed = 0.0,
) -> Mismatch | None:
    """Return the largest difference of the first row that differs by more than is allowed.

    Args:
        expected: The reference output.
        got: The other output. A field that only one of them has differs in every row.
        owner: Names the request of a row.
        rounding: Measures differences.
        allowed: Largest difference of floating-point fields; integers must be equal.
    """
    for name, one, other in _fields(expected, got):
        if one.dtype == other.dtype and torch.equal(one, other):  # the usual case
            continue
        difference, ulp = _difference(one, other), rounding.ulp(one)
        is_float, limit = one.is_floating_point(), torch.zeros(())
        if is_float:
            limit = _rows(allowed(one)) if callable(allowed) else torch.tensor(allowed * ulp)
        excess = difference - limit.to(difference)
        rows = (excess > 0).any(1).nonzero()
        if rows.numel():
            row = int(rows[0])
            column = int(excess[row].argmax())
            return Mismatch(
                field=name,
                row=row,
                request=owner(row, len(difference)),
                expected=float(_rows(one)[row, column]),
                got=float(_rows(other)[row, column]),
                ulps=float(difference[row, column]) / ulp if is_float else None,
                dtype=str(rounding.coarser_dtype(one)).removeprefix("torch.") if is_float else "",
            )
    return None


def first_not_finite(output: Tensors, owner: RowOwner) -> Mismatch | None:
    """Return the first row that is not finite; ``expected`` and ``got`` are the number in it.

    Args:
        output: Fields with live rows. Integers are finite.
        owner: Names the request of a row.
    """
    for name, tensor in output.items():
        rows = not_finite_rows(tensor)
        if len(rows):
            row, numbers = int(rows[0]), _rows(tensor)
            value = float(numbers[row][~numbers[row].isfinite()][0])
            request = owner(row, len(numbers))
            return Mismatch(field=name, row=row, request=request, expected=value, got=value)
    return None


def not_finite_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return the indices of rows with NaN or infinity; a mask may leave -infinity in a part."""
    if not tensor.is_floating_point() or not tensor.numel():
        return torch.empty(0, dtype=torch.int64)
    rows = _rows(tensor)
    is_wrong = rows.isnan() | rows.isposinf()
    return (is_wrong.any(1) | rows.isneginf().all(1)).nonzero()[:, 0]


def allowed_by(rtol: float, atol: float) -> Allowed:
    """Return ``atol + rtol * abs(expected)``, where infinities and NaN count as 0."""

    def allowed(expected: torch.Tensor) -> torch.Tensor:
        size = expected.double().abs()
        return atol + rtol * torch.where(size.isfinite(), size, 0.0)

    return allowed


def _fields(expected: Tensors, got: Tensors) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield each field of either output; NaN replaces a field that is missing."""
    for name in dict.fromkeys([*expected, *got]):
        one, other = expected.get(name), got.get(name)
        if one is None:
            one = _nan_like(other)
        yield name, one, _nan_like(one) if other is None else other


def _nan_like(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None, "one of the outputs has the field"
    return torch.full_like(tensor, torch.nan, dtype=torch.float64)


def _difference(expected: torch.Tensor, got: torch.Tensor) -> torch.Tensor:
    """Return the absolute differences, [rows, columns]; infinite where only one side is NaN."""
    a, b = _rows(expected).double(), _rows(got).double()
    same = (a == b) | (a.isnan() & b.isnan())
    return torch.where(same, 0.0, (a - b).abs().nan_to_num(nan=torch.inf, posinf=torch.inf))


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(tensor.shape[0], -1)
