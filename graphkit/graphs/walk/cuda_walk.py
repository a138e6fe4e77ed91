"""Nodes, edges, memory and times of CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product

import torch

from graphkit.errors import InspectError
from graphkit.graphs.attribution import NodeOrigin
from graphkit.graphs.cuda_graph import CudaGraph
from graphkit.graphs.driver import memory_kind
from graphkit.graphs.pool_memory import memory_segments
from graphkit.graphs.walk.arguments import decode
from graphkit.graphs.walk.driver_nodes import DriverNode, DriverWalk
from graphkit.graphs.walk.kernels import short_name
from graphkit.graphs.walk.memory_map import MemoryMap, NamedTensors
from graphkit.graphs.walk.timing import Span, profile_launches, unprofiled_us
from graphkit.records import Edge, GraphMemory, Node


class CudaWalk:
    """Reads the templates of CUDA graphs; the counterpart of ``RecorderWalk``.

    Args:
        graphs: Graphs that one replay launches one after the other, of one memory pool.
        origins: Origin of each node outside of child graphs and conditional bodies.
        names: Names for the memory of arguments.

    Attributes:
        nodes, edges, memory: As in a ``GraphRecord``, without times.
        device: The graphs' device.

    Raises:
        InspectError: A template was not kept, nothing was captured, or cuda-bindings are missing.
    """

    backend = "cuda"

    def __init__(
        self,
        graphs: Sequence[CudaGraph | torch.cuda.CUDAGraph],
        origins: Sequence[NodeOrigin],
        names: NamedTensors,
    ) -> None:
        self._graphs = graphs
        kept = [graph.graph if isinstance(graph, CudaGraph) else graph for graph in graphs]
        walks = [DriverWalk(_template(graph)) for graph in kept]
        pool = kept[0].pool()
        memory = MemoryMap(names, memory_segments(), pool, memory_kind)
        nodes = list(_joined_nodes(walks))
        known = _inherited([node.parent for node in nodes], origins)
        self.nodes = [
            _record(i, *both, memory) for i, both in enumerate(zip(nodes, known, strict=True))
        ]
        self.edges = tuple(_joined_edges(walks))
        self.memory = self._memory_record(memory)
        self.device = torch.device("cuda", torch.cuda.current_device())

    def launches(self, replay: Callable[[], object]) -> Sequence[Sequence[Span]]:
        """Replay a few times, and return the spans of device work per replay."""
        return profile_launches(replay, len(self._graphs))

    def unprofiled_us(self, replay: Callable[[], object]) -> float:
        """Return the median time of a replay without the profiler, in us."""
        return unprofiled_us(replay)

    def _memory_record(self, memory: MemoryMap) -> GraphMemory:
        addresses = [
            p.address
            for node in self.nodes
            for argument in node.arguments
            for p in argument.pointers
        ]
        return GraphMemory(
            graph_bytes=sum(getattr(graph, "pool_bytes", 0) for graph in self._graphs),
            pool_bytes=sum(segment.size for segment in memory.segments if segment.pool == "graph"),
            segments=memory.segments_with(addresses),
        )


def _template(graph: torch.cuda.CUDAGraph) -> int:
    """Return the handle of the graph's template, a ``CUgraph``."""
    try:
        return int(graph.raw_cuda_graph())
    except (AttributeError, RuntimeError) as error:
        raise InspectError(
            f"cannot inspect a {type(graph).__name__}: {str(error).splitlines()[0].rstrip('.')}. "
            "Make it with torch.cuda.CUDAGraph(keep_graph=True) and capture first."
        ) from error


def _joined_nodes(walks: Sequence[DriverWalk]) -> Iterator[DriverNode]:
    first = 0
    for walk in walks:
        for node in walk.nodes:
            yield node if node.parent is None else replace(node, parent=node.parent + first)
        first += len(walk.nodes)


def _joined_edges(walks: Sequence[DriverWalk]) -> Iterator[Edge]:
    """Yield the edges of each graph, and edges from its last nodes to the next one's first."""
    first, ends = 0, list[int]()
    for walk in walks:
        outer = [i for i, node in enumerate(walk.nodes) if node.parent is None]
        targets = {edge.target for edge in walk.edges}
        sources = {edge.source for edge in walk.edges}
        for source, target in product(ends, (first + i for i in outer if i not in targets)):
            yield Edge(source=source, target=target)
        for edge in walk.edges:
            yield replace(edge, source=edge.source + first, target=edge.target + first)
        ends = [first + i for i in outer if i not in sources] or ends
        first += len(walk.nodes)


def _record(index: int, node: DriverNode, origin: NodeOrigin, memory: MemoryMap) -> Node:
    return Node(
        index=index,
        kind=node.kind,
        name=node.name,
        short_name=short_name(node.name) if node.kind == "kernel" else node.name,
        grid=node.grid,
        block=node.block,
        cluster=node.cluster,
        shared_memory_bytes=node.shared_memory_bytes,
        registers=node.registers,
        attributes=node.attributes,
        arguments=tuple(
            [decode(parameter, memory, origin.operands) for parameter in node.parameters]
        ),
        module=origin.module,
        op=origin.op,
        source=origin.source,
        scope=origin.scope,
        parent=node.parent,
    )


def _inherited(parents: Sequence[int | None], origins: Sequence[NodeOrigin]) -> list[NodeOrigin]:
    """Return the origin of every node; nodes inside of another one have that node's origin."""
    inherited: list[NodeOrigin] = []
    outer = iter(origins)
    for parent in parents:
        inherited.append(next(outer, NodeOrigin()) if parent is None else inherited[parent])
    return inherited
