"""Nodes of a captured graph in a form that is equal for equal captures.

Addresses become names of memory, which do not depend on where the allocator placed it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphkit.audit.bits import checksum
from graphkit.audit.canonical_memory import CanonicalMemory, Constant
from graphkit.graphs.attribution import NodeOrigin
from graphkit.graphs.cuda_graph import CudaGraph
from graphkit.graphs.driver import memory_kind
from graphkit.graphs.host_memory import HostMemory
from graphkit.graphs.pool_memory import device_bytes, memory_segments
from graphkit.graphs.recorded_graph import RecordedGraph
from graphkit.graphs.walk.driver_nodes import DriverNode, DriverWalk
from graphkit.graphs.walk.memory_map import AddressRange, MemoryMap, NamedTensors
from graphkit.graphs.walk.recorder_walk import recorded_nodes
from graphkit.records import Argument, extent

_CONSTANTS = "weight", "external"
"""Kinds of memory that no step is known to write."""


@dataclass(frozen=True, slots=True)
class CanonicalArgument:
    """An argument of a node, without what differs between equal captures.

    Attributes:
        name: The parameter's name; empty if it is unknown.
        data: On CUDA its bytes, on the recorder its text.
        constants: The constants that it points to.
    """

    name: str
    data: bytes | str
    constants: tuple[Constant, ...] = ()


@dataclass(frozen=True, slots=True)
class CanonicalNode:
    """A node of a captured graph.

    Attributes:
        name: The kernel or the operation.
        launch: Names and values of its launch settings, such as ``("grid", "4x1x1")``.
        arguments: Its arguments, in order.
    """

    name: str
    launch: tuple[tuple[str, str], ...]
    arguments: tuple[CanonicalArgument, ...]


def canonical_nodes(graph: Any, names: NamedTensors) -> tuple[CanonicalNode, ...]:
    """Return the nodes of a runner's graph in their canonical form, in order.

    Args:
        graph: A ``CudaGraph``, a ``RecordedGraph``, or a ``GraphSequence`` of them.
        names: As for ``inspect_graph``. State and inputs are compared by name on the recorder.
    """
    graphs: Sequence[Any] = getattr(graph, "graphs", (graph,))
    if isinstance(graphs[0], RecordedGraph):
        return tuple(_recorder_nodes(graphs, names))
    return tuple(_cuda_nodes(graphs, names))


def _cuda_nodes(graphs: Sequence[CudaGraph], names: NamedTensors) -> Iterator[CanonicalNode]:
    host, pool = HostMemory(), MemoryMap({}, memory_segments(), graphs[0].graph.pool())
    memory = CanonicalMemory(
        pool,
        MemoryMap(names),
        lambda address: address in host and not memory_kind(address),
        lambda block: _device_digest(block, graphs[0].device),
    )
    for graph in graphs:
        memory.add_graph(graph.allocations)
        yield from _canonical_nodes(
            DriverWalk(graph.graph.raw_cuda_graph()).nodes, graph.origins, memory
        )


def _canonical_nodes(
    nodes: Sequence[DriverNode], origins: Sequence[NodeOrigin], memory: CanonicalMemory
) -> Sequence[CanonicalNode]:
    """Return the nodes of one graph; those inside of another node read what that node does."""
    outer: list[int] = []
    for index, node in enumerate(nodes):
        outer.append(index if node.parent is None else outer[node.parent])
    canonical: dict[int, CanonicalNode] = {}
    for index in sorted(range(len(nodes)), key=outer.__getitem__):  # as the graph was captured
        node, known = nodes[index], origins[outer[index] : outer[index] + 1]
        contents = memory.arguments(outer[index], node.parameters, *known or [NodeOrigin()])
        arguments = [
            CanonicalArgument(parameter.name, *content)
            for parameter, content in zip(node.parameters, contents, strict=True)
        ]
        canonical[index] = CanonicalNode(node.name, _launch_settings(node), tuple(arguments))
    return [canonical[index] for index in range(len(nodes))]


def _device_digest(block: AddressRange, device: torch.device) -> str:
    return f"#{checksum(device_bytes(block.begin, block.end - block.begin, device)):x}"


def _launch_settings(node: DriverNode) -> tuple[tuple[str, str], ...]:
    attributes = ", ".join(f"{name} {value}" for name, value in node.attributes.items())
    return (
        ("grid", extent(node.grid)),
        ("block", extent(node.block)),
        ("cluster", extent(node.cluster)),
        ("shared memory", str(node.shared_memory_bytes)),
        ("attributes", attributes),
    )


def _recorder_nodes(
    graphs: Sequence[RecordedGraph], names: NamedTensors
) -> Iterator[CanonicalNode]:
    ops = tuple(op for graph in graphs for op in graph.ops)
    for op, node in zip(ops, recorded_nodes(ops, (), names), strict=True):
        values = (*op.args, *op.kwargs.values())
        tensors = {value.data_ptr(): value for value in values if isinstance(value, torch.Tensor)}
        arguments = tuple(_canonical_argument(argument, tensors) for argument in node.arguments)
        yield CanonicalNode(node.name, (), arguments)


def _canonical_argument(
    argument: Argument, tensors: Mapping[int, torch.Tensor]
) -> CanonicalArgument:
    text, constants = argument.text, list[Constant]()
    for pointer in argument.pointers:
        if pointer.memory in _CONSTANTS and pointer.address in tensors:
            name = pointer.name if pointer.memory == "weight" else ""
            contents = tensors[pointer.address]
            constants.append(Constant(pointer.address, None, name, argument.text, contents))
            text = text.replace(f" at {pointer.name}", " at a constant")
    return CanonicalArgument(argument.name, text, tuple(constants))
