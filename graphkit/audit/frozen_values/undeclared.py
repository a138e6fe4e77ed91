"""Numbers that a forward can read and the target does not declare, and the search among them.

Every such number is a candidate, in all layers of a model at once, except for constants of the
architecture: graphs are captured with them on purpose. The search changes all candidates together,
each to a different value, and captures again. An argument that had the value of one candidate, and
now has its new value, names that candidate. If other nodes differ, it halves the candidates.
"""

from __future__ import annotations

import math
import re
import sys
import sysconfig
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from graphkit.audit.capture_differences import CaptureDifference, comparable
from graphkit.audit.host_objects.host_numbers import HostNumber, HostNumbers, value_text
from graphkit.audit.recaptures import Baseline, Change, DifferencesBySize, Recaptures
from graphkit.errors import CaptureError
from graphkit.graphs import named_tensors
from graphkit.runners import Runner
from graphkit.runners.known_memory import is_a
from graphkit.runners.targets import CaptureTarget

_MEMBERS = 64
"""Small numbers that an empty set gets."""
_KINDS = (float, np.floating), (int, np.integer), (bool, np.bool_), (frozenset, frozenset)
"""Values that are searched: floats first, and what changes the number of nodes more often last."""
_INDEX = re.compile(r"(?<=[.\[])\d+(?=[.\])]|$)")
MAX_CAPTURES = 10
"""Captures of a search, without those that confirm what it finds."""
_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("purelib", "platlib"))
_CONFIG = re.compile(r"config\b|\bconfigs?\b", re.IGNORECASE)
_NAMES = re.compile(
    r"(^|_)(eps|epsilon|dim|dims|size|heads|layers?|groups|width|depth|rank|ranks|theta|idx|"
    r"experts|scaling|vocab)(_|$)|^(num|n)_"
)
_CONSTANT = re.compile(r"_*[A-Z][A-Z0-9_]*$")
_TRIVIAL = 16
"""Numbers below it occur too often to tell where they come from."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A number that the forward can read, in all layers of a model.

    Attributes:
        values: Each number with the value to change it to.
    """

    values: Mapping[HostNumber, Any]

    @property
    def first(self) -> HostNumber:
        """The number of the first layer."""
        return next(iter(self.values))

    def explains(self, difference: CaptureDifference) -> bool:
        """Return whether an argument was one of the numbers, and followed its change.

        Only floats explain differences: ints and bools of several candidates change alike.
        """
        if difference.what != "argument" or not isinstance(self.first.before, float):
            return False
        return any(
            _shows_value(difference.before, number.before) and _shows_value(difference.after, value)
            for number, value in self.values.items()
        )


class UndeclaredNumbers:
    """The numbers that a forward can read, other than declared host values.

    Attributes:
        constants: Numbers that are constants of the architecture, one per name of all layers, and
            those whose change makes the capture fail.
        candidates: All others.
        followed: Candidates that graphs follow, with the differences at each size.
        left: Candidates that were not searched when the captures were used up.
        captures: Number of captures of all sizes.
    """

    def __init__(self, target: CaptureTarget, runner: Runner[Any, Any]) -> None:
        self._host = HostNumbers(target.forwards[runner.mode])
        self.followed: list[tuple[Candidate, DifferencesBySize]] = []
        self.left: list[Candidate] = []
        self.captures = 0
        declared = {
            name
            for setter, values in target.host_values.values()
            for name in changed_names(target.forwards[runner.mode], setter, values[0], values[1])
        }
        architecture = Architecture(self._host.numbers, named_tensors(target.weights).values())
        groups: dict[str, list[HostNumber]] = {}
        self.constants: list[HostNumber] = []
        constant_names: set[str] = set()
        for number in self._host.numbers:
            name = _INDEX.sub("*", number.name)
            is_of_torch = str(type(number.container.owner).__module__).startswith("torch.")
            if number.name in declared or is_of_torch or _kind(number.before) is None:
                continue
            if number not in architecture:
                groups.setdefault(name, []).append(number)
            elif name not in constant_names:
                constant_names.add(name)
                self.constants.append(number)
        ordered = sorted(groups.values(), key=lambda group: _kind(group[0].before) or 0)
        words = self._host.words
        self.candidates = [
            Candidate({number: changed_value(number.before, index, words) for number in numbers})
            for index, numbers in enumerate(ordered)
        ]

    def search(self, recaptures: Recaptures, baseline: Baseline) -> None:
        """Change the candidates and capture again, until each is known or captures are used up."""
        pending = [self.candidates] if self.candidates else []
        while pending:
            group = pending.pop(0)
            if self.captures == MAX_CAPTURES:
                self.left += group
                continue
            self.captures += 1
            values = {n: value for candidate in group for n, value in candidate.values.items()}
            change = Change(partial(self._host.varied, values))
            by_size: DifferencesBySize | None = None
            with suppress(CaptureError):
                by_size = recaptures.differences(baseline, change)
            if by_size is None and len(group) == 1:
                self.constants += [candidate.first for candidate in group]
            elif by_size is not None and len(group) == 1 and any(by_size.values()):
                by_size = recaptures.confirmed(baseline, change, by_size)
                self.followed += [(group[0], by_size)] if any(by_size.values()) else []
            elif by_size is None or any(by_size.values()):
                rest = group if by_size is None else self._without_explained(group, by_size)
                half = len(rest) // 2
                pending += [part for part in (rest[:half], rest[half:]) if part]

    def _without_explained(
        self, group: Sequence[Candidate], by_size: DifferencesBySize
    ) -> list[Candidate]:
        """Move the candidates that explain a difference to ``followed``, and return the others.

        Nothing is left to search if they explain all differences.
        """
        explained: dict[int, dict[int, list[CaptureDifference]]] = {}
        is_complete = True
        for size, differences in by_size.items():
            for difference in comparable(differences):
                by = [at for at, candidate in enumerate(group) if candidate.explains(difference)]
                if len(by) == 1:
                    explained.setdefault(by[0], {}).setdefault(size, []).append(difference)
                else:
                    is_complete = False
        self.followed += [(group[index], sizes) for index, sizes in explained.items()]
        rest = [candidate for index, candidate in enumerate(group) if index not in explained]
        return [] if is_complete else rest


def changed_value(value: Any, index: int, words: Collection[str] = ()) -> Any:
    """Return another value for a number or a set.

    Args:
        value: An int changes towards 0, so that offsets and lengths stay in range.
        index: Makes the new values of different floats different.
        words: What an empty set gets: its members may be any words of the code, or small numbers.
    """
    if isinstance(value, frozenset):
        return frozenset() if value else frozenset([*words, *range(_MEMBERS)])
    if isinstance(value, (bool, np.bool_)):
        return type(value)(not value)
    if isinstance(value, (int, np.integer)):
        return type(value)(value - 1 if value > 1 else value + 1)
    factor = 0.5 + index / 1024
    return type(value)(value * factor if value and math.isfinite(value) else factor)


def _kind(value: Any) -> int | None:
    """Return the place of a value among ``_KINDS``; ``None`` if it is not searched."""
    kinds = enumerate(_KINDS)
    return next((at for at, (own, of) in kinds if type(value) is own or is_a(value, of)), None)


@contextmanager
def declared(setter: Callable[[Any], object], before: Any, after: Any) -> Iterator[None]:
    """Set a host value for a block, and set the value before again."""
    try:
        setter(after)
        yield
    finally:
        setter(before)


def changed_names(
    forward: Any, setter: Callable[[Any], object], before: Any, after: Any
) -> tuple[str, ...]:
    """Return the names of the numbers, lists and sets that a setter changes."""

    def numbers() -> dict[str, str]:
        return {number.name: value_text(number.before) for number in HostNumbers(forward).numbers}

    old = numbers()
    with declared(setter, before, after):
        new = numbers()
    return tuple(name for name in {**old, **new} if old.get(name) != new.get(name))


def _shows_value(text: str, value: float) -> bool:
    try:
        return math.isclose(float(text), value, rel_tol=1e-6)
    except ValueError:
        return False


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
