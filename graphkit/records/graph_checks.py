"""Checks that the indices in a graph that was read from a file refer to its nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from graphkit.records.json_readers import InvalidValueError

if TYPE_CHECKING:
    from graphkit.records.graph import Edge, Node, Timing

MAX_DEPTH = 100
"""Deepest nesting of modules and of child graphs; readers of a record recurse into both."""


def check_nodes(nodes: Sequence[Node]) -> None:
    """Refuse nodes whose index is not their position, or that are nested wrongly or too deeply.

    Raises:
        InvalidValueError: Names the first of them.
    """
    depths: list[int] = []
    for position, node in enumerate(nodes):
        at, parent = f".nodes[{position}]", node.parent
        if node.index != position:
            expected = f"{position}, the position of the node in the list"
            raise InvalidValueError(str(node.index), expected, f"{at}.index")
        if parent is not None and parent >= position:
            raise InvalidValueError(str(parent), "the index of an earlier node", f"{at}.parent")
        depths.append(0 if parent is None else depths[parent] + 1)
        if depths[-1] > MAX_DEPTH:
            expected = f"a node inside at most {MAX_DEPTH} others"
            raise InvalidValueError(str(parent), expected, f"{at}.parent")
        names = node.module.count(".") + 1
        if names > MAX_DEPTH:
            expected = f"at most {MAX_DEPTH}"
            raise InvalidValueError(f"a path of {names} names", expected, f"{at}.module")


def check_edges(edges: Sequence[Edge], num_nodes: int) -> None:
    """Refuse edges that lead to no node of the graph, or from a node to itself.

    Raises:
        InvalidValueError: Names the first of them.
    """
    for position, edge in enumerate(edges):
        source, target = edge.source, edge.target
        if source >= num_nodes:
            raise _no_node(source, num_nodes, f".edges[{position}].source")
        if target >= num_nodes:
            raise _no_node(target, num_nodes, f".edges[{position}].target")
        if source == target:
            expected = "a node other than its source"
            raise InvalidValueError(str(target), expected, f".edges[{position}].target")


def check_timing(timing: Timing | None, num_nodes: int) -> None:
    """Refuse a critical path with a node that the graph lacks.

    Raises:
        InvalidValueError: Names the first such node.
    """
    for position, index in enumerate(timing.critical_path if timing else ()):
        if index >= num_nodes:
            raise _no_node(index, num_nodes, f".timing.critical_path[{position}]")


def _no_node(index: int, num_nodes: int, where: str) -> InvalidValueError:
    if not num_nodes:
        return InvalidValueError(str(index), "no index, because the graph has no nodes", where)
    expected = f"the index of a node, 0 to {num_nodes - 1}"
    return InvalidValueError(str(index), expected, where)
