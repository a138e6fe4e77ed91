"""Comparison of tensors of two runs: up to rounding, by live row, with the largest difference."""

from graphkit.runners.comparison.differences import first_difference
from graphkit.runners.comparison.rounding import Rounding, check_tolerance

__all__ = ["Rounding", "check_tolerance", "first_difference"]
