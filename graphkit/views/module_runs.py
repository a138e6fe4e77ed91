"""Runs of nodes of one module in time: each one inside the run of the module around it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Generic, Protocol, TypeVar


class _Span(Protocol):
    """The time of a node, and the names of the modules around it, outermost first."""

    @property
    def begin(self) -> float: ...
    @property
    def end(self) -> float: ...
    @property
    def modules(self) -> tuple[str, ...]: ...


_S = TypeVar("_S", bound=_Span)


@dataclass(frozen=True, slots=True)
class ModuleRun(Generic[_S]):
    """A run of nodes of one module.

    Attributes:
        modules: Names of the modules around it and its own, outermost first.
        begin, end: Its time, in the unit of its nodes.
        spans: Its nodes, those of modules inside of it included.
    """

    modules: tuple[str, ...]
    begin: float
    end: float
    spans: Sequence[_S]


def module_runs(spans: Iterable[_S]) -> Iterator[ModuleRun[_S]]:
    """Yield the runs by time, each before those inside of it.

    A module that runs again after others has a run for each time. A run ends where the next one of
    its depth begins, even if its last node takes longer.
    """
    return _runs(sorted(spans, key=lambda span: (span.begin, -span.end)), 0, math.inf)


def _runs(spans: Sequence[_S], depth: int, limit: float) -> Iterator[ModuleRun[_S]]:
    runs = [list(run) for _, run in groupby(spans, key=lambda span: span.modules[: depth + 1])]
    begins = [*(run[0].begin for run in runs), limit]
    for run, following in zip(runs, begins[1:], strict=True):
        modules, end = run[0].modules[: depth + 1], min(max(span.end for span in run), following)
        if len(modules) > depth:
            yield ModuleRun(modules, run[0].begin, end, run)
            yield from _runs(run, depth + 1, end)
