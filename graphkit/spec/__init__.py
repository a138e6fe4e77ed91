"""Forward modes, algorithms and their widths. Needs no torch to import."""

from graphkit.spec.algorithms import (
    Algorithm,
    CustomSpecAlgorithm,
    SpecAlgorithm,
    algorithm_names,
    get_algorithm,
    register_algorithm,
)
from graphkit.spec.config import Plan, SpecConfig
from graphkit.spec.future_map import FutureMap
from graphkit.spec.modes import ForwardMode

__all__ = [
    "Algorithm",
    "CustomSpecAlgorithm",
    "ForwardMode",
    "FutureMap",
    "Plan",
    "SpecAlgorithm",
    "SpecConfig",
    "algorithm_names",
    "get_algorithm",
    "register_algorithm",
]
