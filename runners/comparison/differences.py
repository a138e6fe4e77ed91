"""Comparison of two outputs of the same batch, up to rounding.

Kernels of different shapes add in different orders, so the same row may differ in its last bits
between a padded and an unpadded batch. How much depends on the dtype, on the depth of the model and
on its kernels, so one step is its own measure: where it rounds little, a small difference counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from graphkit.errors import ConfigError, short_repr
from graphkit.records import Mismatch

_LEAST_ULPS = 8
"""Rounding that is allowed in every step."""
_MOST_ULPS, _MOST_ULPS_OF_HALF = 256, 16
"""Rounding that no step of usual depth reaches.

Kernels for dtypes of two bytes add in float32, so that their results differ in few last bits.
"""
_FLUCTUATION = 4
"""How many times as large as in one run of a step the largest rounding may be in another one."""


@dataclass(frozen=True, slots=True)
class Rounding:
    """Limits of the rounding of a step.

    One ulp of an output field is the spacing of the dtype relative to the field's largest number,
    or to 1 if that is larger, since the layers of a model compute with numbers of that size. The
    coarser of the step's and the field's dtype counts: bfloat16 layers may return float32 logits.

    Attributes:
        dtype: Dtype that the step computes in.
        tolerance: Multiple of the usual limits that is allowed.

    Raises:
        ConfigError: The tolerance is not a finite number above 0.
    """

    dtype: torch.dtype
    tolerance: float = 1.0

    def __post_init__(self) -> None:
        check_tolerance(self.tolerance)

    @property
    def most(self) -> float:
        """Largest rounding between a padded and an unpadded run, in ulp: 256, or 16 in bfloat16."""
        is_half = self.dtype.itemsize <= 2
        return self.tolerance * (_MOST_ULPS_OF_HALF if is_half else _MOST_ULPS)

    def beside(self, natural: float) -> float:
        """Return the largest rounding between two runs of a step, in ulp.

        Args:
            natural: Ulp by which two runs of the step without a graph differ. Four times as many
                are allowed, but at least 8, and at most ``most``.
        """
        return min(self.tolerance * max(_FLUCTUATION * natural, _LEAST_ULPS), self.most)

    def ulp(self, field: torch.Tensor) -> float:
        """Return one ulp of an output field; 0 for integers, and ignoring NaN and infinities."""
        if not field.is_floating_point():
            return 0.0
        values = field.float().abs()
        largest = float(values[values.isfinite()].amax()) if values.isfinite().any() else 0.0
        return float(torch.finfo(self.coarser_dtype(field)).eps * max(1.0, largest))

    def coarser_dtype(self, field: torch.Tensor) -> torch.dtype:
        """Return the dtype whose ulp a floating-point field is measured in."""
        return max(self.dtype, field.dtype, key=lambda dtype: torch.finfo(dtype).eps)


def check_tolerance(tolerance: object) -> None:
    """Check a multiple of the usual rounding.

    Raises:
        ConfigError: It is not a finite number above 0.
    """
    is_number = isinstance(tolerance, (int, float)) and not isinstance(tolerance, bool)
    if not is_number or not 0 < tolerance < math.inf:  # type: ignore[operator]
        raise ConfigError(
            f"tolerance must be a number above 0, and finite, got {short_repr(tolerance)}.",
            field="tolerance",
        )


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
    return _largest(expected, got, lambda _: 1.0)


def largest_ulps(expected: Tensors, got: Tensors, rounding: Rounding) -> float:
    """Return the largest difference in ulp, as ``largest_difference`` compares."""
    return _largest(expected, got, rounding.ulp)


def _largest(expected: Tensors, got: Tensors, unit: Callable[[torch.Tensor], float]) -> float:
    return max(
        (
            float(_difference(one, other).max()) / unit(one)
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
