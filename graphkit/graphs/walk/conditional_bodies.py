"""Bodies of conditional nodes.

Drivers up to 580 have no query for the bodies of a conditional node. But ``cuGraphDebugDotPrint``
writes them to a DOT file with the handle of every node, and a walk needs only the handles.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphkit.graphs.driver import checked

_GRAPH = re.compile(r"subgraph cluster_(\d+) \{")
_NODE = re.compile(r'"graph_\d+_node_(\d+)"\[(.*?)\];', re.DOTALL)
_EDGE = re.compile(r'"graph_\d+_node_(\d+)" -> "graph_\d+_node_(\d+)"')
_HANDLE = re.compile(r"node handle\b.*?(0x[0-9A-Fa-f]+)", re.DOTALL)
_BODY = re.compile(r"\|graph_(\d+)\}")


@dataclass(frozen=True, slots=True)
class ConditionalBody:
    """A graph inside of a conditional node.

    Attributes:
        nodes: Handles of its nodes, in order of creation.
        edges: Its edges, as indices into ``nodes``.
    """

    nodes: tuple[int, ...]
    edges: tuple[tuple[int, int], ...]


def conditional_bodies(driver: Any, graph: Any) -> Mapping[int, tuple[ConditionalBody, ...]]:
    """Return the bodies of every conditional node of a graph by the node's handle.

    Conditional nodes inside of child graphs and of other bodies are included.

    Args:
        driver: The module ``cuda.bindings.driver``.
        graph: A ``CUgraph``.
    """
    flags = driver.CUgraphDebugDot_flags.CU_GRAPH_DEBUG_DOT_FLAGS_HANDLES
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "graph.dot"
        checked(driver.cuGraphDebugDotPrint(graph, str(path).encode(), flags))
        return parse_bodies(path.read_text(errors="replace"))


def parse_bodies(dot: str) -> Mapping[int, tuple[ConditionalBody, ...]]:
    """Return the bodies that a DOT file of ``cuGraphDebugDotPrint`` contains.

    Args:
        dot: The file's text, with handles.
    """
    _, *pieces = _GRAPH.split(dot)  # graph numbers and texts, alternating
    numbered = zip(pieces[::2], pieces[1::2], strict=True)
    graphs = {number: (_nodes(text), _edges(text)) for number, text in numbered}
    bodies = {}
    for nodes, _ in graphs.values():
        for handle, label in nodes:
            if "CONDITIONAL" in label:
                bodies[handle] = tuple(_body(*graphs[n]) for n in _BODY.findall(label))
    return bodies


def _body(nodes: list[tuple[int, str]], edges: tuple[tuple[int, int], ...]) -> ConditionalBody:
    return ConditionalBody(tuple(handle for handle, _ in nodes), edges)


def _nodes(text: str) -> list[tuple[int, str]]:
    """Return handle and label of each node, in the order of the nodes' numbers."""
    nodes = sorted((int(number), label) for number, label in _NODE.findall(text))
    return [(_handle(label), label) for _, label in nodes]


def _handle(label: str) -> int:
    match = _HANDLE.search(label)
    return int(match.group(1), 16) if match else 0


def _edges(text: str) -> tuple[tuple[int, int], ...]:
    return tuple((int(source), int(target)) for source, target in _EDGE.findall(text))
