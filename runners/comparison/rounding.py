"""Differences that are rounding, in units in the last place (ulp) of the dtype of a step.

Kernels of different shapes add in different orders, so the same row may differ in its last bits
between a padded and an unpadded batch. How much depends on the dtype, on the depth of the model and
on its kernels, so one step is its own measure: where it rounds little, a small difference counts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from graphkit.errors import ConfigError, short_repr

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
