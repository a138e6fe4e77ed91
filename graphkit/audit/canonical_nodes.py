"""Nodes of a captured graph in a form that is equal for equal captures.

Addresses in the graph's own pool become offsets into the pool, which do not depend on where the
allocator placed it.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from graphkit.graphs.cuda_graph import CudaGraph
from graphkit.graphs.driver import memory_kind
from graphkit.graphs.host_memory import HostMemory
from graphkit.graphs.recorded_graph import RecordedGraph
from graphkit.graphs.walk.arguments import Parameter
from graphkit.graphs.walk.driver_nodes import DriverNode, DriverWalk
from graphkit.graphs.walk.memory_map import MemoryMap, NamedTensors
from graphkit.graphs.walk.recorder_walk import recorded_nodes
from graphkit.records import Argument, extent

_LOWEST_ADDRESS = 1 << 16
"""Linux maps nothing below (``vm.mmap_min_addr``)."""


@dataclass(frozen=True, slots=True)
class Constant:
    """A tensor that a recorded operation reads and that was neither named nor made by the capture.

    At an equal address the contents may change between replays; at another address the tensor is a
    constant of its capture.

    Attributes:
        address: Its address.
        digest: Digest of its contents.
        tensor: The tensor. Holding it keeps later captures from reusing the address.
    """

    address: int
    digest: str
    tensor: torch.Tensor = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class CanonicalArgument:
    """An argument of a node, without what differs between equal captures.

    Attributes:
        name: The parameter's name; empty if it is unknown.
        data: On CUDA its bytes, on the recorder its text.
        constants: On the recorder, the constants in it.
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
        names: As for ``inspect_graph``; on the recorder, tensors are compared by name.
    """
    graphs: Sequence[Any] = getattr(graph, "graphs", (graph,))
    if isinstance(graphs[0], RecordedGraph):
        return tuple(_recorder_nodes(graphs, names))
    return tuple(node for graph in graphs for node in _cuda_nodes(graph))


def _cuda_nodes(graph: CudaGraph) -> Iterator[CanonicalNode]:
    memory = MemoryMap({}, torch.cuda.memory_snapshot(), graph.graph.pool())
    host = HostMemory()
    for node in DriverWalk(graph.graph.raw_cuda_graph()).nodes:
        arguments = [
            CanonicalArgument(p.name, _canonical_bytes(p, memory, host)) for p in node.parameters
        ]
        yield CanonicalNode(node.name, _launch_settings(node), tuple(arguments))


def _launch_settings(node: DriverNode) -> tuple[tuple[str, str], ...]:
    attributes = ", ".join(f"{name} {value}" for name, value in node.attributes.items())
    return (
        ("grid", extent(node.grid)),
        ("block", extent(node.block)),
        ("cluster", extent(node.cluster)),
        ("shared memory", str(node.shared_memory_bytes)),
        ("attributes", attributes),
    )


def _canonical_bytes(parameter: Parameter, memory: MemoryMap, host: HostMemory) -> bytes:
    """Return the bytes with pool addresses as offsets and host addresses as zeros.

    A second pass finds addresses left on the stack, which may be aligned to four bytes only.
    """
    data = bytearray(parameter.data or b"")
    for at, word in (
        *parameter.addresses(_LOWEST_ADDRESS),
        *parameter.addresses(_LOWEST_ADDRESS, shift=4),
    ):
        offset = memory.pool_offset(word)
        if offset is not None:
            data[at : at + 8] = offset.to_bytes(8, "little")
        elif word in host and not memory_kind(word):
            data[at : at + 8] = bytes(8)
    return bytes(data)


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
    external = [pointer.address for pointer in argument.pointers if pointer.memory == "external"]
    constants = tuple(
        Constant(address, _digest(tensors[address]), tensors[address])
        for address in external
        if address in tensors
    )
    return CanonicalArgument(argument.name, argument.text, constants)


def _digest(tensor: torch.Tensor) -> str:
    values = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return f"#{zlib.crc32(values.numpy().tobytes()):08x}"
