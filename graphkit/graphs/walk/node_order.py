"""Execution order and critical path of a graph, whose nodes may contain others.

Child graphs and conditional nodes contain nodes; ``Node.parent`` names the node around them.
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

    Below a node that contains others, the path leads through the contained nodes before it reaches
    the next node. A node without a duration counts as 0.

    Args:
        nodes: All nodes, each at its ``index``.
        edges: Edges between them, without a cycle.
    """
    predecessors = _predecessors(nodes, edges)
    end_us: dict[int, float] = {}  # of the longest path that ends at the node
    came_from: dict[int, int | None] = {}
    order = TopologicalSorter({node.index: predecessors[node.index] for node in nodes})
    for index in order.static_order():
        last = max(predecessors[index], key=lambda i: end_us[i], default=None)
        came_from[index] = last
        start_us = 0.0 if last is None else end_us[last]
        end_us[index] = start_us + (nodes[index].duration_us or 0.0)
    node: int | None = max(end_us, key=lambda i: end_us[i], default=None)
    path = []
    while node is not None:
        path.append(node)
        node = came_from[node]
    return tuple(reversed(path))


def _predecessors(nodes: Sequence[Node], edges: Sequence[Edge]) -> Mapping[int, Sequence[int]]:
    """Return the nodes that each node waits for, by index.

    The first nodes inside a node wait for that node. What follows the node waits for the last nodes
    inside it.
    """
    children, sources = _children(nodes), {edge.source for edge in edges}

    def last_inside(index: int) -> list[int]:
        inner = [node.index for node in children[index] if node.index not in sources]
        return list(chain.from_iterable(map(last_inside, inner))) or [index]

    predecessors: dict[int, list[int]] = defaultdict(list)
    for edge in edges:
        predecessors[edge.target] += last_inside(edge.source)
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
