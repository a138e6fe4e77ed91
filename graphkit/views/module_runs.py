"""Runs of nodes of one module in time: each one inside the run of the module around it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from graphkit.records import Node


@dataclass(frozen=True, slots=True)
class Span:
    """The time of a node.

    Attributes:
        node: The node.
        begin, end: Its time; an int in a unit in which times are exact.
        modules: Names of the modules around it, outermost first.
    """

    node: Node
    begin: float
    end: float
    modules: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ModuleRun:
    """A run of nodes of one module.

    Attributes:
        modules: Names of the modules around it and its own, outermost first.
        begin, end: Its time, in the unit of its nodes.
        spans: Its nodes, those of modules inside of it included.
    """

    modules: tuple[str, ...]
    begin: float
    end: float
    spans: Sequence[Span]


def module_runs(spans: Iterable[Span]) -> Iterator[ModuleRun]:
    """Yield the runs by time, each before those inside of it.

    A module that runs again after others has a run for each time. A run ends where the next one of
    its depth begins, even if its last node takes longer.
    """
    return _runs(sorted(spans, key=lambda span: (span.begin, -span.end)), 0, math.inf)


def _runs(spans: Sequence[Span], depth: int, limit: float) -> Iterator[ModuleRun]:
    runs = [list(run) for _, run in groupby(spans, key=lambda span: span.modules[: depth + 1])]
    begins = [*(run[0].begin for run in runs), limit]
    for run, following in zip(runs, begins[1:], strict=True):
        modules, end = run[0].modules[: depth + 1], min(max(span.end for span in run), following)
        if len(modules) > depth:
            yield ModuleRun(modules, run[0].begin, end, run)
            yield from _runs(run, depth + 1, end)
