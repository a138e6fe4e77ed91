"""Numbers that a forward can read and the target does not declare, and how to change them.

Every such number is a candidate, in all layers of a model at once, except for constants of the
architecture: graphs are captured with them on purpose.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from graphkit.audit.capture_differences import CaptureDifference
from graphkit.audit.frozen_values.architecture import Architecture
from graphkit.audit.host_objects.host_numbers import HostNumber, HostNumbers
from graphkit.graphs import named_tensors
from graphkit.runners import Runner
from graphkit.runners.targets import CaptureTarget

_MEMBERS = 64
"""Small numbers that an empty set gets."""
_INDEX = re.compile(r"(?<=[.\[])\d+(?=[.\])]|$)")


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

    Args:
        target: The target, with its declared host values set to their first.
        runner: A runner of the target.

    Attributes:
        constants: Numbers that are constants of the architecture, one per name of all layers.
        candidates: All others.
    """

    def __init__(self, target: CaptureTarget, runner: Runner[Any, Any]) -> None:
        self._host = HostNumbers(target.forwards[runner.mode])
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
            if number.name in declared:
                continue
            if number not in architecture:
                groups.setdefault(name, []).append(number)
            elif name not in constant_names:
                constant_names.add(name)
                self.constants.append(number)
        self.candidates = [
            Candidate(
                {
                    number: changed_value(number.before, index, self._host.words)
                    for number in numbers
                }
            )
            for index, numbers in enumerate(sorted(groups.values(), key=_order))
        ]

    def changed(self, candidates: Iterable[Candidate]) -> AbstractContextManager[None]:
        """Change candidates for a block; see ``HostNumbers.varied``."""
        return self._host.varied(
            {number: value for each in candidates for number, value in each.values.items()}
        )


def changed_value(value: Any, index: int, words: Collection[str] = ()) -> Any:
    """Return another value for a number or a set.

    Args:
        value: An int changes towards 0, so that offsets and lengths stay in range.
        index: Makes the new values of different floats different.
        words: What an empty set gets: its members may be any words of the code, or small numbers.
    """
    if isinstance(value, frozenset):
        return frozenset() if value else frozenset([*words, *range(_MEMBERS)])
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value - 1 if value > 1 else value + 1
    factor = 0.5 + index / 1024
    return value * factor if value and math.isfinite(value) else factor


def _order(numbers: Sequence[HostNumber]) -> int:
    """Order floats first, and what changes the number of nodes more often last."""
    return [float, int, bool, frozenset].index(type(numbers[0].before))


def changed_names(
    forward: Any, setter: Callable[[Any], object], before: Any, after: Any
) -> tuple[str, ...]:
    """Return the names of the numbers, lists and sets that a setter changes.

    Args:
        forward: The forward that reads them.
        setter: Sets a declared host value, which is ``before`` now.
        before: One of its values.
        after: Another one.
    """

    def numbers() -> dict[str, str]:
        return {number.name: repr(number.before) for number in HostNumbers(forward).numbers}

    old = numbers()
    try:
        setter(after)
        new = numbers()
    finally:
        setter(before)
    return tuple(name for name in {**old, **new} if old.get(name) != new.get(name))


def _shows_value(text: str, value: float) -> bool:
    try:
        return math.isclose(float(text), value, rel_tol=1e-6)
    except ValueError:
        return False
