"""Comparison of a target's forwards with the model that they wrap."""

from graphkit.models.wrapper.comparison import WRAPPED_MODES, compare_wrapper

__all__ = ["WRAPPED_MODES", "compare_wrapper"]
