"""Runs of the nodes of one module in time: each one inside the run of the module around it."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from graphkit.records import GraphRecord, Node
from graphkit.views.module_tree import common_part, node_parts, nodes_in_modules


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


@dataclass(frozen=True, slots=True)
class Box:
    """A run of nodes of one module.

    Attributes:
        begin, end: Its time in the replay, in us.
        name: Name of the module, without those around it.
        part: Part of its nodes; empty if they have several.
    """

    begin: float
    end: float
    name: str
    part: str


@dataclass(frozen=True)
class Level:
    """The boxes of one depth, by time; they do not overlap."""

    boxes: tuple[Box, ...]

    def at(self, time: float) -> Box | None:
        """Return the box at a time in us; ``None`` between boxes."""
        index = bisect_right(self._begins, time) - 1
        return self.boxes[index] if index >= 0 and time < self.boxes[index].end else None

    def largest_share(self, begin: float, end: float) -> float:
        """Return the share of a time that one box takes at most, of one."""
        inside = (min(box.end, end) - max(box.begin, begin) for box in self.boxes)
        return max(inside, default=0.0) / (end - begin)

    @cached_property
    def _begins(self) -> list[float]:
        return [box.begin for box in self.boxes]


def module_levels(graph: GraphRecord) -> tuple[Level, ...]:
    """Return the modules of the measured nodes by depth, outermost first.

    In a whole step, the outermost level has its phases. A module that runs again after others has
    a box for each time.
    """
    parts = node_parts(graph)
    spans = [
        Span(node, node.start_us, node.end_us, modules)
        for modules, node in nodes_in_modules(graph)
        if node.start_us is not None and math.isfinite(node.end_us)
    ]
    levels: list[list[Box]] = []
    for run in module_runs(spans):
        depth, part = len(run.modules) - 1, common_part(parts[s.node.index] for s in run.spans)
        if depth == len(levels):
            levels.append([])
        levels[depth].append(Box(run.begin, run.end, run.modules[-1], part))
    return tuple(Level(tuple(boxes)) for boxes in levels)
