"""The order of nodes where some hold others: a child graph, or the bodies of a conditional node."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from graphlib import TopologicalSorter
from itertools import chain

from graphkit.records import Edge, Node

Held = Mapping[int | None, Sequence[Node]]
"""Nodes by the index of what holds them; those of the graph itself by ``None``."""


def execution_order(nodes: Sequence[Node]) -> Iterator[Node]:
    """Each node in order of creation, and right after it what it holds."""
    held = _held(nodes)

    def within(holder: int | None) -> Iterator[Node]:
        for node in held[holder]:
            yield node
            yield from within(node.index)

    return within(None)


def critical_path(nodes: Sequence[Node], edges: Sequence[Edge]) -> tuple[int, ...]:
    """Indices of the nodes on the way through the edges that takes longest.

    Between a node that holds others and what comes after it, the way goes through those.
    """
    before = _before(nodes, edges)
    longest: dict[int, float] = {}
    came_from: dict[int, int | None] = {}
    in_time = TopologicalSorter({node.index: before[node.index] for node in nodes})
    for index in in_time.static_order():
        last = max(before[index], key=lambda i: longest[i], default=None)
        came_from[index] = last
        until_then = 0.0 if last is None else longest[last]
        longest[index] = until_then + (nodes[index].duration_us or 0.0)
    at: int | None = max(longest, key=lambda i: longest[i], default=None)
    path = []
    while at is not None:
        path.append(at)
        at = came_from[at]
    return tuple(reversed(path))


def _before(nodes: Sequence[Node], edges: Sequence[Edge]) -> Mapping[int, Sequence[int]]:
    """What each node waits for: the last of what its edges come from holds, or what holds it."""
    held, left = _held(nodes), {edge.source for edge in edges}

    def ends(index: int) -> list[int]:
        inner = [node.index for node in held[index] if node.index not in left]
        return list(chain.from_iterable(map(ends, inner))) or [index]

    before: dict[int, list[int]] = defaultdict(list)
    for edge in edges:
        before[edge.target] += ends(edge.source)
    for node in nodes:
        if node.parent is not None and not before[node.index]:
            before[node.index] = [node.parent]
    return before


def _held(nodes: Sequence[Node]) -> Held:
    held: dict[int | None, list[Node]] = defaultdict(list)
    for node in nodes:
        held[node.parent].append(node)
    return held
