"""Execution order and critical path of nodes that may contain others.

Child graphs and conditional nodes contain nodes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from graphlib import TopologicalSorter
from itertools import chain

from graphkit.records import Edge, Node


def execution_order(nodes: Sequence[Node]) -> Iterator[Node]:
    """Yield each node in order of creation, followed by the nodes that it contains."""
    children = _children(nodes)

    def below(parent: int | None) -> Iterator[Node]:
        for node in children[parent]:
            yield node
            yield from below(node.index)

    return below(None)


def critical_path(nodes: Sequence[Node], edges: Sequence[Edge]) -> tuple[int, ...]:
    """Return the indices of the nodes on the path through the edges that takes longest.

    The path from a node that contains others to its successor leads through those others. Nodes
    without a duration count as 0.
    """
    predecessors = _predecessors(nodes, edges)
    longest_us: dict[int, float] = {}
    came_from: dict[int, int | None] = {}
    order = TopologicalSorter({node.index: predecessors[node.index] for node in nodes})
    for index in order.static_order():
        last = max(predecessors[index], key=lambda i: longest_us[i], default=None)
        came_from[index] = last
        begins_us = 0.0 if last is None else longest_us[last]
        longest_us[index] = begins_us + (nodes[index].duration_us or 0.0)
    at: int | None = max(longest_us, key=lambda i: longest_us[i], default=None)
    path = []
    while at is not None:
        path.append(at)
        at = came_from[at]
    return tuple(reversed(path))


def _predecessors(nodes: Sequence[Node], edges: Sequence[Edge]) -> Mapping[int, Sequence[int]]:
    """Return the nodes that each node waits for.

    The first nodes inside of another one wait for it. The successors of a node that contains others
    wait for the last ones of those.
    """
    children, sources = _children(nodes), {edge.source for edge in edges}

    def ends(index: int) -> list[int]:
        inner = [node.index for node in children[index] if node.index not in sources]
        return list(chain.from_iterable(map(ends, inner))) or [index]

    predecessors: dict[int, list[int]] = defaultdict(list)
    for edge in edges:
        predecessors[edge.target] += ends(edge.source)
    for node in nodes:
        if node.parent is not None and not predecessors[node.index]:
            predecessors[node.index] = [node.parent]
    return predecessors


def _children(nodes: Sequence[Node]) -> Mapping[int | None, Sequence[Node]]:
    """Return nodes by the index of the node that contains them; ``None`` for the graph itself."""
    children: dict[int | None, list[Node]] = defaultdict(list)
    for node in nodes:
        children[node.parent].append(node)
    return children
