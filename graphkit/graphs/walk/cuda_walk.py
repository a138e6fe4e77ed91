"""Nodes, edges, memory and times of a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
from graphkit.records import GraphMemory, Node


class CudaWalk:
    """Reads the template of a CUDA graph; the counterpart of ``RecorderWalk``.

    Args:
        graph: The graph.
        origins: Origin of each node outside of child graphs and conditional bodies.
        names: Names for the memory of arguments.

    Attributes:
        nodes, edges, memory: As in a ``GraphRecord``, without times.
        device: The graph's device.

    Raises:
        InspectError: The template was not kept, nothing was captured, or cuda-bindings are missing.
    """

    backend = "cuda"

    def __init__(
        self,
        graph: CudaGraph | torch.cuda.CUDAGraph,
        origins: Sequence[NodeOrigin],
        names: NamedTensors,
    ) -> None:
        self._graph = graph
        kept = graph.graph if isinstance(graph, CudaGraph) else graph
        walk = DriverWalk(_template(kept))
        memory = MemoryMap(names, memory_segments(), kept.pool(), memory_kind)
        known = _inherited([node.parent for node in walk.nodes], origins)
        self.nodes = [
            _record(i, *both, memory) for i, both in enumerate(zip(walk.nodes, known, strict=True))
        ]
        self.edges = tuple(walk.edges)
        self.memory = self._memory_record(memory)
        self.device = torch.device("cuda", torch.cuda.current_device())

    def launches(self, replay: Callable[[], object]) -> Sequence[Sequence[Span]]:
        """Replay a few times, and return the spans of device work per replay."""
        return profile_launches(replay)

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
            graph_bytes=getattr(self._graph, "pool_bytes", 0),
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
