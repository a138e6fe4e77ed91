"""Matching of the graphs of two records."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from graphkit.records import GraphRecord

_Key = Callable[[GraphRecord], Hashable]
_LINE_NUMBER = re.compile(r":\d+")


@dataclass(frozen=True, slots=True)
class MatchedGraphs:
    """Graphs of two records.

    Attributes:
        pairs: Graphs that match, in the order of the record after.
        only_before, only_after: Graphs without a match.
    """

    pairs: tuple[tuple[GraphRecord, GraphRecord], ...]
    only_before: tuple[GraphRecord, ...] = ()
    only_after: tuple[GraphRecord, ...] = ()


def match_graphs(before: Sequence[GraphRecord], after: Sequence[GraphRecord]) -> MatchedGraphs:
    """Match the graphs of runners by mode and size.

    Match other graphs by name and line; the rest by name, then by file and function without the
    line number, which moves with every edit, then by order. Graphs with equal keys match in order.
    """
    left, right = dict(enumerate(before)), dict(enumerate(after))
    found: dict[int, int] = {}
    for key in (_mode_and_size_or_line, _name, _function, _any):
        for i, j in _matches(left, right, key):
            found[j] = i
            del left[i], right[j]
    pairs = tuple((before[found[j]], after[j]) for j in sorted(found))
    return MatchedGraphs(pairs, tuple(left.values()), tuple(right.values()))


def _matches(
    left: dict[int, GraphRecord], right: dict[int, GraphRecord], key: _Key
) -> list[tuple[int, int]]:
    waiting: dict[Hashable, list[int]] = {}
    for i, graph in left.items():
        waiting.setdefault(key(graph), []).append(i)
    equal = ((waiting.get(key(graph)), j) for j, graph in right.items() if key(graph) is not None)
    return [(indices.pop(0), j) for indices, j in equal if indices]


def _mode_and_size_or_line(graph: GraphRecord) -> Hashable:
    return (graph.mode, graph.batch_size) if graph.mode else (graph.name, graph.captured_at)


def _name(graph: GraphRecord) -> Hashable:
    return None if graph.mode else graph.name


def _function(graph: GraphRecord) -> Hashable:
    return None if graph.mode else _LINE_NUMBER.sub("", graph.captured_at)


def _any(graph: GraphRecord) -> Hashable:
    return None if graph.mode else ""
