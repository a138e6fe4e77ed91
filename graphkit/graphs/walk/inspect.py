"""A captured graph, ours or anybody's, as a record."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import torch
from torch import nn

from graphkit.errors import InspectError
from graphkit.graphs.attribution import Attribution, Place
from graphkit.graphs.chained import ChainedGraph
from graphkit.graphs.cuda import CudaGraph
from graphkit.graphs.driver import memory_kind
from graphkit.graphs.environment import environment
from graphkit.graphs.recorder import RecordedGraph
from graphkit.graphs.walk.arguments import decoded
from graphkit.graphs.walk.driver_nodes import DriverNode, DriverWalk
from graphkit.graphs.walk.kernel_names import short
from graphkit.graphs.walk.memory_map import MemoryMap, Names
from graphkit.graphs.walk.recorded import edges_of, nodes_of
from graphkit.graphs.walk.timing import Span, launches_of, timed
from graphkit.records import Edge, GraphMemory, GraphRecord, Node

Graph = torch.cuda.CUDAGraph | CudaGraph | RecordedGraph | ChainedGraph
"""What can be looked into."""


def inspect_graph(
    graph: Any,
    *,
    names: nn.Module | Names | None = None,
    attribution: Attribution | None = None,
    name: str = "",
    captured_at: str = "",
    replay: Callable[[], object] | None = None,
) -> GraphRecord:
    """Read what is inside a captured graph.

    Changes nothing, and runs nothing unless ``replay`` is given. About ten microseconds per node,
    and a look at the allocator.

    Args:
        graph: A ``torch.cuda.CUDAGraph`` that was made with ``keep_graph=True`` and captured, by
            whomever, or a graph of a runner.
        names: The model, or tensors by kind of memory and name, such as
            ``{"weight": dict(model.named_parameters()), "input": {"ids": ids}}``: what arguments
            point to is then called so.
        attribution: What was on during the capture, if the graph is not a runner's.
        name: For the record.
        captured_at: The line that captured it, for the record.
        replay: Launches the graph once; given, some replays are measured.

    Raises:
        InspectError: The graph's template was not kept, nothing was captured, it was closed, or
            cuda-bindings are missing.
    """
    parts: Sequence[Any] = graph.graphs if isinstance(graph, ChainedGraph) else (graph,)
    places = attribution.places if attribution is not None else getattr(graph, "places", ())
    names = {"weight": tensors_of(names)} if isinstance(names, nn.Module) else names or {}
    if isinstance(parts[0], RecordedGraph):
        return _recorded(parts, places, names, name, captured_at, replay)
    return _walked(parts, places, names, name, captured_at, replay)


def _recorded(
    parts: Sequence[RecordedGraph],
    places: Sequence[Place],
    names: Names,
    name: str,
    captured_at: str,
    replay: Callable[[], object] | None,
) -> GraphRecord:
    if any(len(part.ops) != part.num_nodes for part in parts):
        raise InspectError("cannot look into a graph that was closed. Look into it before close().")
    ops = tuple(op for part in parts for op in part.ops)
    nodes = tuple(nodes_of(ops, places, names))
    edges = tuple(edges_of(ops))
    launches = _watched(parts, replay, [node.name for node in nodes]) if replay else ()
    nodes, timing = timed(nodes, edges, launches)
    return GraphRecord(
        name=name,
        backend="recorder",
        environment=environment(torch.device("cpu")),
        captured_at=captured_at,
        nodes=nodes,
        edges=edges,
        timing=timing,
    )


def _walked(
    parts: Sequence[CudaGraph | torch.cuda.CUDAGraph],
    places: Sequence[Place],
    names: Names,
    name: str,
    captured_at: str,
    replay: Callable[[], object] | None,
) -> GraphRecord:
    graphs = [part.graph if isinstance(part, CudaGraph) else part for part in parts]
    walks = [DriverWalk(_template(graph)) for graph in graphs]
    pool = graphs[0].pool()
    memory = MemoryMap(names, torch.cuda.memory_snapshot(), pool, memory_kind)
    found = list(_joined(walks))
    made = _placed([node.parent for node in found], places)
    nodes = [_node(i, *both, memory) for i, both in enumerate(zip(found, made, strict=True))]
    edges = tuple(_edges(walks))
    with_times, timing = timed(nodes, edges, launches_of(replay, len(parts)) if replay else ())
    pointed = [p.address for node in nodes for each in node.arguments for p in each.pointers]
    return GraphRecord(
        name=name,
        backend="cuda",
        environment=environment(torch.device("cuda", torch.cuda.current_device())),
        captured_at=captured_at,
        nodes=with_times,
        edges=edges,
        timing=timing,
        memory=GraphMemory(
            graph_bytes=sum(getattr(part, "pool_bytes", 0) for part in parts),
            pool_bytes=sum(each.size for each in memory.segments if each.pool == "graph"),
            segments=memory.segments_of(pointed),
        ),
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


def _node(index: int, node: DriverNode, place: Place, memory: MemoryMap) -> Node:
    return Node(
        index=index,
        kind=node.kind,
        name=node.name,
        short_name=short(node.name) if node.kind == "kernel" else node.name,
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


def _placed(parents: Sequence[int | None], places: Sequence[Place]) -> list[Place]:
    """What made each node; those inside of another were made with it."""
    made: list[Place] = []
    outer = iter(places)
    for parent in parents:
        made.append(next(outer, Place()) if parent is None else made[parent])
    return made


def _watched(
    parts: Sequence[RecordedGraph], replay: Callable[[], object], names: Sequence[str]
) -> list[list[Span]]:
    """How long each operation took, in a few replays."""
    launches = []
    try:
        for _ in range(3):
            for part in parts:
                part.stopwatch = []
            replay()
            times = [both for part in parts for both in pairwise(part.stopwatch or [])]
            spans = [Span(n, (), a, b - a) for n, (a, b) in zip(names, times, strict=False)]
            launches.append(spans)
    finally:
        for part in parts:
            part.stopwatch = None
    return launches


def tensors_of(
    weights: nn.Module | Mapping[str, torch.Tensor] | None,
) -> dict[str, torch.Tensor]:
    """A model's parameters and buffers by path; a mapping as it is."""
    if isinstance(weights, nn.Module):
        return dict([*weights.named_parameters(), *weights.named_buffers()])
    return dict(weights or {})
