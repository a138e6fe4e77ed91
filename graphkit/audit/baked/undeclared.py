"""Search for host values that graphs keep and the target does not declare.

Every number that the forward can read is a candidate, in all layers of a model at once. The search
changes all candidates together, each to a different value, and captures again. An argument that
had the value of one candidate, and now has its new value, names that candidate. If other nodes
differ, the search halves the candidates.

Constants of the architecture are not changed: graphs are captured with them on purpose.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from graphkit.audit.baked.architecture import Architecture
from graphkit.audit.baked.host_changes import DifferencesBySize
from graphkit.audit.baked.recaptures import Baseline, Recaptures
from graphkit.errors import CaptureError
from graphkit.graphs import UNSET_MARKER, named_tensors
from graphkit.graphs.walk.capture_differences import CaptureDifference
from graphkit.runners import Runner
from graphkit.runners.host_numbers import HostNumber, HostNumbers
from graphkit.targets import CaptureTarget

MAX_CAPTURES = 10
"""Captures of a search. The audit takes six others if the target declares no host values."""
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


@dataclass(slots=True)
class Search:
    """Result of a search.

    Attributes:
        followed: Candidates that graphs follow, with the differences at each size.
        fixed: Candidates whose change makes the capture fail.
        left: Candidates that were not searched when the captures were used up.
        captures: Number of captures of all sizes.
    """

    followed: list[tuple[Candidate, DifferencesBySize]] = field(default_factory=list)
    fixed: list[Candidate] = field(default_factory=list)
    left: list[Candidate] = field(default_factory=list)
    captures: int = 0


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
        self._is_cuda = runner.device.type == "cuda"
        declared = set(_declared(target, runner))
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
            Candidate({number: changed_value(number.before, index) for number in numbers})
            for index, numbers in enumerate(sorted(groups.values(), key=_order))
        ]

    def search(self, recaptures: Recaptures, baseline: Baseline) -> Search:
        """Change the candidates, capture again, and return those that graphs follow."""
        result = Search()
        pending = [self.candidates] if self.candidates else []
        while pending:
            group = pending.pop(0)
            if result.captures == MAX_CAPTURES:
                result.left += group
                continue
            result.captures += 1
            found = self._differences(group, recaptures, baseline)
            if found is None and len(group) == 1:
                result.fixed += group
            elif found is not None and len(group) == 1 and any(found.values()):
                if self._is_cuda:  # other contents of the bytes that torch leaves unset
                    found = self._confirmed(group, found, recaptures, baseline)
                result.followed += [(group[0], found)] if any(found.values()) else []
            elif found is None or any(found.values()):
                rest = group if found is None else _without_explained(group, found, result)
                half = len(rest) // 2
                pending += [part for part in (rest[:half], rest[half:]) if part]
        return result

    def _differences(
        self,
        group: Sequence[Candidate],
        recaptures: Recaptures,
        baseline: Baseline,
        stack_fill: int = 0,
    ) -> DifferencesBySize | None:
        """Return what changes with some candidates; ``None`` if the capture fails."""
        values = {
            number: value for candidate in group for number, value in candidate.values.items()
        }
        with self._host.varied(values):
            try:
                nodes = recaptures.canonical_nodes(recaptures.batches(seed=1), stack_fill)
            except CaptureError:
                return None
        return baseline.differences(baseline.nodes, nodes)

    def _confirmed(
        self,
        group: Sequence[Candidate],
        found: DifferencesBySize,
        recaptures: Recaptures,
        baseline: Baseline,
    ) -> DifferencesBySize:
        """Return the differences that show again with another fill of the stack."""
        again = self._differences(group, recaptures, baseline, UNSET_MARKER) or {}
        return {
            size: [d for d in differences if d in again.get(size, ())]
            for size, differences in found.items()
        }


def _without_explained(
    group: Sequence[Candidate], found: DifferencesBySize, result: Search
) -> list[Candidate]:
    """Move the candidates that explain a difference to the result, and return the others.

    Nothing is left to search if they explain all differences.
    """
    explained: dict[int, dict[int, list[CaptureDifference]]] = {}
    is_complete = True
    for size, differences in found.items():
        for difference in comparable(differences):
            by = [index for index, candidate in enumerate(group) if candidate.explains(difference)]
            if len(by) == 1:
                explained.setdefault(by[0], {}).setdefault(size, []).append(difference)
            else:
                is_complete = False
    result.followed += [(group[index], sizes) for index, sizes in explained.items()]
    rest = [candidate for index, candidate in enumerate(group) if index not in explained]
    return [] if is_complete else rest


def comparable(differences: Sequence[CaptureDifference]) -> Iterator[CaptureDifference]:
    """Yield differences up to the first different kernel if the numbers of nodes differ.

    After a node that only one capture has, the comparison pairs unrelated nodes.
    """
    is_longer = any(difference.what == "number of nodes" for difference in differences)
    for difference in differences:
        yield difference
        if is_longer and difference.what == "kernel":
            return


def changed_value(value: float, index: int) -> float:
    """Return another value for a number.

    Args:
        value: An int changes towards 0, so that offsets and lengths stay in range.
        index: Makes the new values of different floats different.
    """
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value - 1 if value > 1 else value + 1
    factor = 0.5 + index / 1024
    return value * factor if value and math.isfinite(value) else factor


def _order(numbers: Sequence[HostNumber]) -> int:
    """Order floats before ints and bools, which change the number of nodes more often."""
    return [float, int, bool].index(type(numbers[0].before))


def _declared(target: CaptureTarget, runner: Runner[Any, Any]) -> Iterator[str]:
    """Yield the names of the numbers that the setters of declared host values change."""

    def numbers() -> set[tuple[str, str]]:
        found = HostNumbers(target.forwards[runner.mode]).numbers
        return {(number.name, repr(number.before)) for number in found}

    for setter, values in target.host_values.values():
        before = numbers()
        try:
            setter(values[1])
            after = numbers()
        finally:
            setter(values[0])
        yield from (name for name, _ in before ^ after)


def _shows_value(text: str, value: float) -> bool:
    try:
        return math.isclose(float(text), value, rel_tol=1e-6)
    except ValueError:
        return False
