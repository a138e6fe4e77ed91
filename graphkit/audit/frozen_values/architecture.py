"""Recognise constants of an architecture among the numbers of a forward."""

from __future__ import annotations

import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from graphkit.audit.host_objects.host_numbers import HostNumber

_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("purelib", "platlib"))
_CONFIG = re.compile(r"config\b|\bconfigs?\b", re.IGNORECASE)
_NAMES = re.compile(
    r"(^|_)(eps|epsilon|dim|dims|size|heads|layers?|groups|width|depth|rank|ranks|theta|idx|"
    r"experts|scaling|vocab)(_|$)|^(num|n)_"
)
_CONSTANT = re.compile(r"_*[A-Z][A-Z0-9_]*$")
_TRIVIAL = 16
"""Numbers below it occur too often to tell where they come from."""


class Architecture:
    """Tells constants of an architecture from values that a host may change between replays.

    A number is a constant if it is named like one, if a configuration or an object of an installed
    library holds it, if it is a size of a weight or a power of one, or if it is the length of a
    list of modules or tensors.
    """

    def __init__(self, numbers: Iterable[HostNumber], weights: Iterable[torch.Tensor]) -> None:
        sizes = {size for weight in weights for size in weight.shape}
        self._values = {power for size in sizes for power in _powers(size)}
        for number in numbers:
            if _is_configuration(number) and type(number.before) in (int, float):
                self._values |= {*_powers(number.before)}
        self._values = {
            value
            for value in self._values
            if value >= _TRIVIAL or (not float(value).is_integer() and value not in (0.5, 0.25))
        }

    def __contains__(self, number: HostNumber) -> bool:
        """Return whether a number is a constant of the architecture."""
        key = number.container.name(number.key).rpartition(".")[2]
        return (
            _CONSTANT.match(key) is not None
            or _NAMES.search(key) is not None
            or _is_configuration(number)
            or _is_of_library(number.container.owner)
            # The length of a list may equal a size of the model by chance.
            or (
                _holds_layers(number.container.get(number.key))
                if number.is_length
                else type(number.before) is not bool and number.before in self._values
            )
        )


def _powers(value: float) -> Iterator[float]:
    yield value
    if value > 0:
        yield from (value**0.5, value**-0.5, 1 / value)


def _is_configuration(number: HostNumber) -> bool:
    prefix = number.container.prefix
    return _CONFIG.search(prefix) is not None or prefix.endswith("Config")


def _is_of_library(owner: Any) -> bool:
    """Return whether the code of an object, a function or a module is in an installed package."""
    if isinstance(owner, ModuleType):
        file = getattr(owner, "__file__", None)
    else:
        kind = owner if isinstance(owner, (type, FunctionType)) else type(owner)
        file = getattr(sys.modules.get(str(kind.__module__)), "__file__", None)
    return str(file).startswith(_LIBRARIES)


def _holds_layers(items: Any) -> bool:
    return any(isinstance(item, (nn.Module, torch.Tensor)) for item in items)
