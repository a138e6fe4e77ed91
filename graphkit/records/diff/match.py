"""Which graphs of two records belong together."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from graphkit.records.graph import GraphRecord

_Key = Callable[[GraphRecord], Hashable]
_LINE = re.compile(r":\d+")


@dataclass(frozen=True, slots=True)
class Matched:
    """Graphs of two records.

    Attributes:
        pairs: Those that belong together, in the order of after.
        only_before, only_after: The others.
    """

    pairs: tuple[tuple[GraphRecord, GraphRecord], ...]
    only_before: tuple[GraphRecord, ...] = ()
    only_after: tuple[GraphRecord, ...] = ()


def match_graphs(before: Sequence[GraphRecord], after: Sequence[GraphRecord]) -> Matched:
    """Match the graphs of runners by mode and size.

    Others by name and place; what is left of those by name, by place without the line's number,
    which moves with every edit, and in the end by order. Of alike ones the first with the first.
    """
    left, right = dict(enumerate(before)), dict(enumerate(after))
    found: dict[int, int] = {}
    for key in (_runner_or_place, _name, _file, _nothing):
        for i, j in _twins(left, right, key):
            found[j] = i
            del left[i], right[j]
    pairs = tuple((before[found[j]], after[j]) for j in sorted(found))
    return Matched(pairs, tuple(left.values()), tuple(right.values()))


def _twins(
    left: dict[int, GraphRecord], right: dict[int, GraphRecord], key: _Key
) -> list[tuple[int, int]]:
    waiting: dict[Hashable, list[int]] = {}
    for i, graph in left.items():
        waiting.setdefault(key(graph), []).append(i)
    alike = ((waiting.get(key(graph)), j) for j, graph in right.items() if key(graph) is not None)
    return [(places.pop(0), j) for places, j in alike if places]


def _runner_or_place(graph: GraphRecord) -> Hashable:
    return (graph.mode, graph.batch_size) if graph.mode else (graph.name, graph.captured_at)


def _name(graph: GraphRecord) -> Hashable:
    return None if graph.mode else graph.name


def _file(graph: GraphRecord) -> Hashable:
    return None if graph.mode else _LINE.sub("", graph.captured_at)


def _nothing(graph: GraphRecord) -> Hashable:
    return None if graph.mode else ""
