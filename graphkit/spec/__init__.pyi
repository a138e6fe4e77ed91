from graphkit.spec.algorithms import (
    Algorithm as Algorithm,
    CustomSpecAlgorithm as CustomSpecAlgorithm,
    SpecAlgorithm as SpecAlgorithm,
    algorithm_names as algorithm_names,
    get_algorithm as get_algorithm,
    register_algorithm as register_algorithm,
)
from graphkit.spec.config import Plan as Plan, SpecConfig as SpecConfig
from graphkit.spec.future_map import FutureMap as FutureMap
from graphkit.spec.modes import ForwardMode as ForwardMode
