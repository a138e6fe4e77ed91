"""Comparison of tensors of two runs: up to rounding, by live row, with the largest difference."""

from graphkit.runners.comparison.differences import Rounding, check_tolerance, first_difference
from graphkit.runners.comparison.step_comparison import (
    GRAPH_DIFFERS,
    INPUT_WRITTEN,
    PADDING_LEAKS,
    GraphVerdict,
    StepComparison,
    judge_graph,
)

__all__ = [
    "GRAPH_DIFFERS",
    "INPUT_WRITTEN",
    "PADDING_LEAKS",
    "GraphVerdict",
    "Rounding",
    "StepComparison",
    "check_tolerance",
    "first_difference",
    "judge_graph",
]
