"""Nodes of a captured graph in a form that is equal for equal captures.

The allocator may place the same tensor elsewhere in each capture. An address in the graph's own
pool therefore becomes the number of the allocation that holds it at its node, and the offset there.
Memory outside of the pool is compared by its address, and if it is small and has no name also by
its contents.
"""

from __future__ import annotations

import zlib
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from graphkit.audit.bits import checksum
from graphkit.graphs import Allocation
from graphkit.graphs.attribution import NodeOrigin
from graphkit.graphs.driver import memory_kind
from graphkit.graphs.host_memory import HostMemory
from graphkit.graphs.pool_memory import device_bytes, memory_segments
from graphkit.graphs.recorded_graph import RecordedGraph
from graphkit.graphs.walk.arguments import Parameter
from graphkit.graphs.walk.driver_nodes import DriverNode, DriverWalk
from graphkit.graphs.walk.memory_map import AddressRange, MemoryMap, NamedTensors
from graphkit.graphs.walk.recorder_walk import recorded_nodes
from graphkit.records import Argument, extent

_CONSTANTS = "weight", "external"
"""Kinds of memory that no step is known to write."""
_LOWEST_ADDRESS = 1 << 16
"""Linux maps nothing below (``vm.mmap_min_addr``)."""
_MOST_BYTES = 1 << 24
"""A larger block without a name is compared by its address alone."""


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
        launch: Names and values of its launch settings, such as ``("grid", "4x1x1")``.
    """

    name: str
    launch: tuple[tuple[str, str], ...]
    arguments: tuple[CanonicalArgument, ...]


def canonical_nodes(graph: Any, names: NamedTensors) -> tuple[CanonicalNode, ...]:
    """Return the nodes of a runner's graph in their canonical form, in order.

    Args:
        graph: A ``CudaGraph`` or a ``RecordedGraph``.
        names: As for ``inspect_graph``. State and inputs are compared by name on the recorder.
    """
    if isinstance(graph, RecordedGraph):
        return tuple(_recorder_nodes(graph, names))
    host, pool = HostMemory(), MemoryMap({}, memory_segments(), graph.graph.pool())

    def digest(block: AddressRange) -> str:
        return f"#{checksum(device_bytes(block.begin, block.end - block.begin, graph.device)):x}"

    memory = CanonicalMemory(
        graph.allocations,
        pool,
        MemoryMap(names),
        lambda address: address in host and not memory_kind(address),
        digest,
    )
    nodes = DriverWalk(graph.graph.raw_cuda_graph()).nodes
    return tuple(_canonical_nodes(nodes, graph.origins, memory))


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


def _launch_settings(node: DriverNode) -> tuple[tuple[str, str], ...]:
    attributes = ", ".join(f"{name} {value}" for name, value in node.attributes.items())
    return (
        ("grid", extent(node.grid)),
        ("block", extent(node.block)),
        ("cluster", extent(node.cluster)),
        ("shared memory", str(node.shared_memory_bytes)),
        ("attributes", attributes),
    )


def _recorder_nodes(graph: RecordedGraph, names: NamedTensors) -> Iterator[CanonicalNode]:
    for op, node in zip(graph.ops, recorded_nodes(graph.ops, (), names), strict=True):
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


@dataclass(frozen=True, slots=True)
class Constant:
    """Memory that a node reads and that the capture did not allocate.

    At an equal address the contents may change between replays; at another address the memory is a
    constant of its capture.

    Attributes:
        address: Its address.
        offset: Offset of the address in its argument, in bytes; ``None`` on the recorder.
        name: Name of the memory, if it has one on the recorder.
        text: Dtype and shape of the tensor there, with the name; empty on CUDA.
        contents: Digest of its contents, or the tensor, which keeps later captures from using its
            address; ``None`` compares the address alone.
    """

    address: int
    offset: int | None = None
    name: str = ""
    text: str = ""
    contents: str | torch.Tensor | None = field(default=None, compare=False, repr=False)

    def is_same(self, other: Constant) -> bool:
        """Return whether a node computes the same from both."""
        if self.address == other.address:
            return True
        if self.name and other.name and self.name != other.name:  # such as two rows of a pool
            return False
        return "" != self._digest == other._digest

    def difference(self, other: Constant) -> tuple[str, str]:
        """Return what tells both constants apart, as two texts."""
        if self.text != other.text:
            return self.text, other.text
        return f"constant {self._digest}", f"constant {other._digest}"

    @property
    def _digest(self) -> str:
        if isinstance(self.contents, torch.Tensor):
            values = self.contents.detach().contiguous().view(-1).view(torch.uint8)
            return f"#{zlib.crc32(values.numpy().tobytes()):08x}"
        return self.contents or ""


class CanonicalMemory:
    """Rewrites the addresses in the arguments of a graph's nodes.

    Args:
        allocations: What the operations of the graph allocated, in order.
        pool: Finds memory by the blocks of the allocator. The graph's own pool is ``pool``.
        named: Finds memory that has a name, such as that of weights. Its contents are not read.
        is_host: Returns whether an address is one of host memory that no kernel can use.
        digest: Returns the digest of a block's contents.
    """

    def __init__(
        self,
        allocations: Iterable[Allocation],
        pool: MemoryMap,
        named: MemoryMap,
        is_host: Callable[[int], bool],
        digest: Callable[[AddressRange], str],
    ) -> None:
        self._pool, self._named = pool, named
        self._is_host, self._digest = is_host, digest
        self._digests: dict[int, str] = {}
        self._held = _HeldAllocations(allocations)

    def arguments(
        self, node: int, parameters: Iterable[Parameter], origin: NodeOrigin
    ) -> Iterator[tuple[bytes, tuple[Constant, ...]]]:
        """Yield the canonical bytes of each parameter, and the constants that it points to."""
        self._held.advance(node)
        for parameter in parameters:
            data, constants = bytearray(parameter.data or b""), list[Constant]()
            # A second pass finds addresses that the stack held, which may be aligned to four bytes.
            aligned = parameter.addresses(_LOWEST_ADDRESS)
            for at, word in (*aligned, *parameter.addresses(_LOWEST_ADDRESS, shift=4)):
                block = self._pool.range_of(word)
                if block is not None and block.memory == "pool":
                    data[at : at + 8] = self._place(word, origin)
                elif block is not None and at % 8 == 0 and block.memory == "external":
                    constants.append(Constant(word, at, contents=self._digest_of(word, block)))
                elif self._is_host(word):
                    data[at : at + 8] = bytes(8)
            yield bytes(data), tuple(constants)

    def _place(self, address: int, origin: NodeOrigin) -> bytes:
        """Return the number of an allocation and the offset in it; zeros for scratch memory.

        Scratch memory belongs to an operation, but not to one of its operands.
        """
        is_operand = any(begin <= address < begin + size for begin, size in origin.operands)
        held = self._held.find(address) if is_operand or not origin.op else None
        if held is None:
            return bytes(8)
        number, offset = held
        return (offset & 0xFFFFFFFF).to_bytes(4, "little") + number.to_bytes(4, "little")

    def _digest_of(self, address: int, block: AddressRange) -> str | None:
        is_large = block.end - block.begin > _MOST_BYTES
        if is_large or self._named.range_of(address) is not None:
            return None
        if block.begin not in self._digests:
            self._digests[block.begin] = self._digest(block)
        return f"{self._digests[block.begin]}+{address - block.begin:#x}"


class _HeldAllocations:
    """The allocation at each address while the nodes of a graph pass."""

    def __init__(self, allocations: Iterable[Allocation]) -> None:
        self._begins: list[int] = []
        self._held: list[tuple[int, int]] = []
        """End and number of the allocation at the same place of ``_begins``."""
        self._coming = deque(allocations)
        self._count = 0

    def advance(self, node: int) -> None:
        """Add what was allocated by the operations up to that of a node."""
        while self._coming and self._coming[0].node <= node:
            self._add(self._coming.popleft())

    def find(self, address: int) -> tuple[int, int] | None:
        """Return the number of an allocation, and the offset of the address there."""
        at = bisect_right(self._begins, address) - 1
        if at < 0 or address >= self._held[at][0]:
            return None
        return self._held[at][1], address - self._begins[at]

    def _add(self, new: Allocation) -> None:
        """Add an allocation. What overlaps it is free again."""
        self._count += 1
        if new.begin == new.end:
            return
        first = max(bisect_right(self._begins, new.begin) - 1, 0)
        if first < len(self._held) and self._held[first][0] <= new.begin:
            first += 1
        last = max(bisect_left(self._begins, new.end), first)
        self._begins[first:last] = [new.begin]
        self._held[first:last] = [(new.end, self._count)]
