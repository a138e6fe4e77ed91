"""A captured graph as something that two captures of it can be compared by.

Addresses in the graph's own pool become offsets, which are the same however often it is captured.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from graphkit.graphs.cuda import CudaGraph
from graphkit.graphs.driver import memory_kind
from graphkit.graphs.host_memory import HostMemory
from graphkit.graphs.recorder import RecordedGraph
from graphkit.graphs.walk.arguments import Parameter
from graphkit.graphs.walk.driver_nodes import DriverNode, DriverWalk
from graphkit.graphs.walk.memory_map import MemoryMap, NamedTensors
from graphkit.graphs.walk.recorder_walk import nodes_of
from graphkit.records import Argument

_LOWEST = 1 << 16
"""No process has memory below."""


@dataclass(frozen=True, slots=True)
class CanonicalArgument:
    """What a node was given, without what is different from capture to capture.

    Attributes:
        name: The parameter's name; empty for a compiled kernel's.
        data: Its bytes on CUDA, its text on the recorder.
        constants: On the recorder, address and digest of tensors in it that came from outside and
            that nobody declared. The same memory may hold something else at every replay; other
            memory is a constant that the capture made.
        alive: Those tensors, so that no later capture's stand where they stood.
    """

    name: str
    data: bytes | str
    constants: tuple[tuple[int, str], ...] = ()
    alive: tuple[torch.Tensor, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class CanonicalNode:
    """What a node does.

    Attributes:
        name: The kernel, or the operation.
        launch: How it is launched: what of it, and its value.
        arguments: What it is given.
    """

    name: str
    launch: tuple[tuple[str, str], ...]
    arguments: tuple[CanonicalArgument, ...]


def canonical_nodes(graph: Any, names: NamedTensors) -> tuple[CanonicalNode, ...]:
    """The image of a runner's graph.

    Args:
        graph: A ``CudaGraph`` or ``RecordedGraph``, or a chain of them.
        names: As for ``inspect_graph``; the recorder's tensors are compared by name.
    """
    parts: Sequence[Any] = getattr(graph, "graphs", (graph,))
    if isinstance(parts[0], RecordedGraph):
        return tuple(_of_ops(parts, names))
    return tuple(node for part in parts for node in _of_template(part))


def _of_template(part: CudaGraph) -> Iterator[CanonicalNode]:
    memory = MemoryMap({}, torch.cuda.memory_snapshot(), part.graph.pool())
    host = HostMemory()
    for node in DriverWalk(part.graph.raw_cuda_graph()).nodes:
        arguments = [CanonicalArgument(p.name, _settled(p, memory, host)) for p in node.parameters]
        yield CanonicalNode(node.name, _launch(node), tuple(arguments))


def _launch(node: DriverNode) -> tuple[tuple[str, str], ...]:
    unusual = ", ".join(f"{name} {value}" for name, value in node.attributes.items())
    return (
        ("grid", _extent(node.grid)),
        ("block", _extent(node.block)),
        ("cluster", _extent(node.cluster)),
        ("shared memory", str(node.shared_memory_bytes)),
        ("attributes", unusual),
    )


def _extent(extent: Sequence[int]) -> str:
    return "x".join(map(str, extent))


def _settled(parameter: Parameter, memory: MemoryMap, host: HostMemory) -> bytes:
    """The bytes with offsets for addresses in the graph's pool, and without the host's own.

    What the stack held may be an address that stands between two aligned ones.
    """
    data = bytearray(parameter.data or b"")
    for at, word in (*parameter.addresses(_LOWEST), *parameter.addresses(_LOWEST, shift=4)):
        offset = memory.pool_offset(word)
        if offset is not None:
            data[at : at + 8] = offset.to_bytes(8, "little")
        elif word in host and not memory_kind(word):
            data[at : at + 8] = bytes(8)
    return bytes(data)


def _of_ops(parts: Sequence[RecordedGraph], names: NamedTensors) -> Iterator[CanonicalNode]:
    ops = tuple(op for part in parts for op in part.ops)
    for op, node in zip(ops, nodes_of(ops, (), names), strict=True):
        given = {t.data_ptr(): t for t in (*op.args, *op.kwargs.values()) if _is_tensor(t)}
        arguments = tuple(_given(each, given) for each in node.arguments)
        yield CanonicalNode(node.name, (), arguments)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _given(argument: Argument, given: Mapping[int, torch.Tensor]) -> CanonicalArgument:
    outside = [each.address for each in argument.pointers if each.memory == "external"]
    alive = tuple(given[address] for address in outside if address in given)
    constants = tuple((tensor.data_ptr(), _digest(tensor)) for tensor in alive)
    return CanonicalArgument(argument.name, argument.text, constants, alive)


def _digest(tensor: torch.Tensor) -> str:
    values = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return f"#{zlib.crc32(values.numpy().tobytes()):08x}"
