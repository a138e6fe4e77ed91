"""Search for undeclared numbers that graphs keep.

The search changes all candidates together, each to a different value, and captures again. An
argument that had the value of one candidate, and now has its new value, names that candidate. If
other nodes differ, the search halves the candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from graphkit.audit.capture_differences import CaptureDifference, comparable
from graphkit.audit.frozen_values.undeclared import Candidate, UndeclaredNumbers
from graphkit.audit.recaptures import Baseline, Change, DifferencesBySize, Recaptures
from graphkit.errors import CaptureError

MAX_CAPTURES = 10
"""Captures of a search, without those that confirm what it finds."""


class NumberSearch:
    """A search among the undeclared numbers of a forward.

    Args:
        numbers: The numbers.
        recaptures: Captures the graphs again.
        baseline: A capture without a change.

    Attributes:
        followed: Candidates that graphs follow, with the differences at each size.
        fixed: Candidates whose change makes the capture fail.
        left: Candidates that were not searched when the captures were used up.
        captures: Number of captures of all sizes.
    """

    def __init__(
        self, numbers: UndeclaredNumbers, recaptures: Recaptures, baseline: Baseline
    ) -> None:
        self._numbers, self._recaptures, self._baseline = numbers, recaptures, baseline
        self.followed: list[tuple[Candidate, DifferencesBySize]] = []
        self.fixed: list[Candidate] = []
        self.left: list[Candidate] = []
        self.captures = 0

    def run(self) -> None:
        """Change the candidates and capture again, until each is known or captures are used up."""
        candidates = self._numbers.candidates
        pending = [candidates] if candidates else []
        while pending:
            group = pending.pop(0)
            if self.captures == MAX_CAPTURES:
                self.left += group
                continue
            self.captures += 1
            change = Change(partial(self._numbers.changed, group))
            by_size = self._differences(change)
            if by_size is None and len(group) == 1:
                self.fixed += group
            elif by_size is not None and len(group) == 1 and any(by_size.values()):
                by_size = self._recaptures.confirmed(self._baseline, change, by_size)
                self.followed += [(group[0], by_size)] if any(by_size.values()) else []
            elif by_size is None or any(by_size.values()):
                rest = group if by_size is None else self._without_explained(group, by_size)
                half = len(rest) // 2
                pending += [part for part in (rest[:half], rest[half:]) if part]

    def _differences(self, change: Change) -> DifferencesBySize | None:
        """Return what changes with some candidates; ``None`` if the capture fails."""
        try:
            return self._recaptures.differences(self._baseline, change)
        except CaptureError:
            return None

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
