"""Several captured graphs that make one step together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graphkit.graphs.backend import CapturedGraph


class ChainedGraph:
    """Graphs that are replayed one after the other. See ``CapturedGraph``.

    Args:
        graphs: In their order; the last one makes the output.
    """

    def __init__(self, graphs: Sequence[CapturedGraph]) -> None:
        self.graphs = tuple(graphs)
        self.output: Any = graphs[-1].output
        self.num_nodes = sum(graph.num_nodes for graph in graphs)
        self.pool_bytes = sum(graph.pool_bytes for graph in graphs)
        self.places = tuple(place for graph in graphs for place in graph.places)

    def replay(self) -> None:
        """Replay all of them."""
        for graph in self.graphs:
            graph.replay()

    def close(self) -> None:
        """Close all of them."""
        for graph in self.graphs:
            graph.close()
        self.output = None
