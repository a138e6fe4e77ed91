"""A captured graph: its nodes and edges, its times and its memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from graphkit.errors import RecordError
from graphkit.records.node import Edge, Node, Timeline
from graphkit.records.record import Count, Duration, Environment, Integer, Record

MAX_DEPTH = 100
"""Deepest nesting of modules and of child graphs; readers of a record recurse into both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Time of replays on the device.

    A profiler measures the nodes and makes replays longer, above all the gaps between nodes, which
    ``GraphRecord.timeline`` has.

    Attributes:
        replays: Number of profiled replays.
        p50_us, p95_us: Time of a profiled replay, from the start of its first node to the end of
            its last one.
        critical_path: Indices of the nodes on the longest path through the edges.
        critical_us: Sum of their durations.
        bound_by: How durations were assigned to nodes: ``order``, or ``name and grid``.
        unprofiled_us: Median time of a replay without the profiler that follows another replay;
            ``None`` if not measured.
    """

    replays: Count
    p50_us: Duration
    p95_us: Duration
    critical_path: tuple[Count, ...]
    critical_us: Duration
    bound_by: str
    unprofiled_us: Duration | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A piece of device memory that a graph points into.

    Attributes:
        address: First address.
        size: Size in bytes.
        used: Allocated bytes.
        pool: ``graph`` for the graph's own pool, else ``default`` or ``other``.
    """

    address: Count
    size: Count
    used: Count
    pool: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphMemory:
    """The memory of a graph.

    Attributes:
        graph_bytes: Bytes by which the pool grew during capture.
        pool_bytes: Bytes of the whole pool, which other graphs may share.
        segments: Segments that its nodes point to, by address.
    """

    graph_bytes: Integer
    pool_bytes: Count
    segments: tuple[Segment, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphRecord(Record):
    """One captured graph.

    Attributes:
        name: ``TARGET_VERIFY 8`` for a runner's graph, otherwise the line that captured it.
        backend: ``cuda`` or ``recorder``.
        environment: Where it was captured.
        mode: Name of the forward mode; empty without a runner.
        batch_size: Captured size; 0 without a runner.
        captured_at: Line that captured it; empty if unknown.
        process: Index of the process in a ``ForeignRecord``.
        nodes: Nodes in order of creation; those inside a child graph or body follow all nodes of
            the graph around it.
        edges: Dependencies between nodes of the same graph or body.
        timing: ``None`` if no replay was measured.
        memory: ``None`` on the recorder.
    """

    KIND: ClassVar[str] = "graph"
    name: str
    backend: str
    environment: Environment
    mode: str = ""
    batch_size: Count = 0
    captured_at: str = ""
    process: Count = 0
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...] = ()
    timing: Timing | None = None
    memory: GraphMemory | None = None

    @property
    def title(self) -> str:
        """Name of the graph."""
        return self.name

    @property
    def graphs(self) -> tuple[GraphRecord, ...]:
        """The graph itself, as other records have their graphs."""
        return (self,)

    @property
    def timeline(self) -> Timeline:
        """The measured nodes in time."""
        return Timeline.from_nodes(self.nodes)

    def check_contents(self) -> None:
        """Refuse indices that refer to no node, and nodes that are nested wrongly or too deeply."""
        self._check_nodes()
        num_nodes = len(self.nodes)
        for position, edge in enumerate(self.edges):
            at = f"edges[{position}]"
            if edge.source >= num_nodes:
                raise _no_node(f"{at}.source", edge.source, num_nodes)
            if edge.target >= num_nodes:
                raise _no_node(f"{at}.target", edge.target, num_nodes)
            if edge.source == edge.target:
                raise _invalid(f"{at}.target", edge.target, "a node other than its source")
        for position, index in enumerate(self.timing.critical_path if self.timing else ()):
            if index >= num_nodes:
                raise _no_node(f"timing.critical_path[{position}]", index, num_nodes)

    def _check_nodes(self) -> None:
        """Refuse nodes whose index is not their position, or that are nested wrongly or deeply."""
        depths: list[int] = []
        for position, node in enumerate(self.nodes):
            at, parent = f"nodes[{position}]", node.parent
            if node.index != position:
                expected = f"{position}, the position of the node in the list"
                raise _invalid(f"{at}.index", node.index, expected)
            if parent is not None and parent >= position:
                raise _invalid(f"{at}.parent", parent, "the index of an earlier node")
            depths.append(0 if parent is None else depths[parent] + 1)
            if depths[-1] > MAX_DEPTH:
                raise _invalid(f"{at}.parent", parent, f"a node inside at most {MAX_DEPTH} others")
            names = node.module.count(".") + 1
            if names > MAX_DEPTH:
                raise _invalid(f"{at}.module", f"a path of {names} names", f"at most {MAX_DEPTH}")


def check_graphs(graphs: Sequence[GraphRecord]) -> None:
    """Check the contents of the graphs of another record.

    Raises:
        RecordError: Names the first invalid index by its path.
    """
    for position, graph in enumerate(graphs):
        try:
            graph.check_contents()
        except RecordError as error:
            raise RecordError(f"graphs[{position}].{error}") from None


def _no_node(at: str, index: int, num_nodes: int) -> RecordError:
    nodes = f"the index of a node, 0 to {num_nodes - 1}"
    return _invalid(at, index, nodes if num_nodes else "no index, because the graph has no nodes")


def _invalid(at: str, value: object, expected: str) -> RecordError:
    return RecordError(f"{at} is {value}; expected {expected}")
