"""Modules of a replay as boxes in time: each one inside the box of the module around it."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from graphkit.records import GraphRecord
from graphkit.views.module_tree import nodes_in_modules
from graphkit.views.parts import common_part, node_parts


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


@dataclass(frozen=True, slots=True)
class _Span:
    begin: float
    end: float
    names: tuple[str, ...]
    part: str


def module_levels(graph: GraphRecord) -> tuple[Level, ...]:
    """Return the modules of the measured nodes by depth, outermost first.

    In a whole step, the outermost level has its phases. A module that runs again after others has
    a box for each time.
    """
    spans = sorted(_spans(graph), key=lambda span: (span.begin, -span.end))
    levels: list[list[Box]] = []
    _add(levels, spans, 0, math.inf)
    return tuple(Level(tuple(boxes)) for boxes in levels)


def _spans(graph: GraphRecord) -> Iterator[_Span]:
    parts = node_parts(graph)
    for names, node in nodes_in_modules(graph):
        if node.start_us is not None and math.isfinite(node.end_us):
            yield _Span(node.start_us, node.end_us, names, parts[node.index])


def _add(levels: list[list[Box]], spans: Sequence[_Span], depth: int, limit: float) -> None:
    """Add a box for each run of nodes of one module, and the boxes inside it.

    A box ends where the next one begins, even if its last node runs longer.
    """
    runs = [list(run) for _, run in groupby(spans, key=lambda span: span.names[: depth + 1])]
    begins = [*(run[0].begin for run in runs), limit]
    for run, following in zip(runs, begins[1:], strict=True):
        names, end = run[0].names, min(max(span.end for span in run), following)
        if len(names) > depth:
            if len(levels) == depth:
                levels.append([])
            part = common_part(span.part for span in run)
            levels[depth].append(Box(run[0].begin, end, names[depth], part))
            _add(levels, run, depth + 1, end)
