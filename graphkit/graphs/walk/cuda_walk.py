"""What CUDA graphs hold, one after the other, in the words of a record."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product

import torch

from graphkit.errors import InspectError
from graphkit.graphs.attribution import NodeOrigin
from graphkit.graphs.cuda import CudaGraph
from graphkit.graphs.driver import memory_kind
from graphkit.graphs.walk.arguments import decoded
from graphkit.graphs.walk.driver_nodes import DriverNode, DriverWalk
from graphkit.graphs.walk.kernel_names import short_name
from graphkit.graphs.walk.memory_map import MemoryMap, NamedTensors
from graphkit.graphs.walk.timing import Span, launches_of
from graphkit.records import Edge, GraphMemory, Node


class CudaWalk:
    """The templates of CUDA graphs; see ``RecorderWalk`` for its likeness on the recorder.

    Args:
        parts: Graphs that one replay launches one after the other, in one memory pool.
        origins: What made each node.
        names: What arguments point to.

    Attributes:
        nodes, edges, memory: As in a ``GraphRecord``, without times.
        device: Where the graphs run.

    Raises:
        InspectError: A template was not kept, or nothing was captured.
    """

    backend = "cuda"

    def __init__(
        self,
        parts: Sequence[CudaGraph | torch.cuda.CUDAGraph],
        origins: Sequence[NodeOrigin],
        names: NamedTensors,
    ) -> None:
        self._parts = parts
        graphs = [part.graph if isinstance(part, CudaGraph) else part for part in parts]
        walks = [DriverWalk(_template(graph)) for graph in graphs]
        pool = graphs[0].pool()
        known = MemoryMap(names, torch.cuda.memory_snapshot(), pool, memory_kind)
        found = list(_joined(walks))
        made = _placed([node.parent for node in found], origins)
        self.nodes = [
            _node(i, *both, known) for i, both in enumerate(zip(found, made, strict=True))
        ]
        self.edges = tuple(_edges(walks))
        self.memory = self._memory(known)
        self.device = torch.device("cuda", torch.cuda.current_device())

    def launches(self, replay: Callable[[], object]) -> Sequence[Sequence[Span]]:
        """What ran in each of some replays."""
        return launches_of(replay, len(self._parts))

    def _memory(self, known: MemoryMap) -> GraphMemory:
        pointed = [
            p.address for node in self.nodes for each in node.arguments for p in each.pointers
        ]
        return GraphMemory(
            graph_bytes=sum(getattr(part, "pool_bytes", 0) for part in self._parts),
            pool_bytes=sum(each.size for each in known.segments if each.pool == "graph"),
            segments=known.segments_of(pointed),
        )


def _template(graph: torch.cuda.CUDAGraph) -> int:
    try:
        return int(graph.raw_cuda_graph())
    except (AttributeError, RuntimeError) as error:
        raise InspectError(
            f"cannot look into a {type(graph).__name__}: {str(error).splitlines()[0]}. "
            "Make it with torch.cuda.CUDAGraph(keep_graph=True) and capture before."
        ) from error


def _joined(walks: Sequence[DriverWalk]) -> Iterator[DriverNode]:
    first = 0
    for walk in walks:
        for node in walk.nodes:
            yield node if node.parent is None else replace(node, parent=node.parent + first)
        first += len(walk.nodes)


def _edges(walks: Sequence[DriverWalk]) -> Iterator[Edge]:
    """Those of each graph, and one from every end of each to every beginning of the next."""
    first, ends = 0, list[int]()
    for walk in walks:
        own = [i for i, node in enumerate(walk.nodes) if node.parent is None]
        reached = {edge.target for edge in walk.edges}
        left = {edge.source for edge in walk.edges}
        for source, target in product(ends, (first + i for i in own if i not in reached)):
            yield Edge(source=source, target=target)
        for edge in walk.edges:
            kind = "programmatic" if edge.is_programmatic else "full"
            yield Edge(source=edge.source + first, target=edge.target + first, kind=kind)
        ends = [first + i for i in own if i not in left] or ends
        first += len(walk.nodes)


def _node(index: int, node: DriverNode, place: NodeOrigin, memory: MemoryMap) -> Node:
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
        arguments=tuple([decoded(parameter, memory) for parameter in node.parameters]),
        module=place.module,
        op=place.op,
        source=place.source,
        scope=place.scope,
        parent=node.parent,
    )


def _placed(parents: Sequence[int | None], origins: Sequence[NodeOrigin]) -> list[NodeOrigin]:
    """What made each node; those inside of another were made with it."""
    made: list[NodeOrigin] = []
    outer = iter(origins)
    for parent in parents:
        made.append(next(outer, NodeOrigin()) if parent is None else made[parent])
    return made
