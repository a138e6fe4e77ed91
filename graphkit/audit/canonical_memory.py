"""Addresses in the arguments of kernels, by the memory that they name instead of its place.

The allocator may place the same tensor elsewhere in each capture. An address in the graph's own
pool therefore becomes the number of the allocation that holds it at its node, and the offset there.
Memory outside of the pool is compared by its address, and if it is small and has no name also by
its contents.
"""

from __future__ import annotations

import zlib
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from graphkit.graphs import Allocation
from graphkit.graphs.attribution import NodeOrigin
from graphkit.graphs.walk.arguments import Parameter
from graphkit.graphs.walk.memory_map import AddressRange, MemoryMap

_LOWEST_ADDRESS = 1 << 16
"""Linux maps nothing below (``vm.mmap_min_addr``)."""
_MOST_BYTES = 1 << 24
"""A larger block without a name is compared by its address alone."""


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
        pool: Finds memory by the blocks of the allocator. The graph's own pool is ``pool``.
        named: Finds memory that has a name, such as that of weights. Its contents are not read.
        is_host: Returns whether an address is one of host memory that no kernel can use.
        digest: Returns the digest of a block's contents.
    """

    def __init__(
        self,
        pool: MemoryMap,
        named: MemoryMap,
        is_host: Callable[[int], bool],
        digest: Callable[[AddressRange], str],
    ) -> None:
        self._pool, self._named = pool, named
        self._is_host, self._digest = is_host, digest
        self._digests: dict[int, str] = {}
        self._held = _HeldAllocations()

    def add_graph(self, allocations: Sequence[Allocation]) -> None:
        """Go on with the next graph of a sequence, which may read the memory of those before it."""
        self._held.add_graph(allocations)

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

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._held: list[tuple[int, int]] = []
        """End and number of the allocation at the same place of ``_begins``."""
        self._coming: deque[Allocation] = deque()
        self._count = 0

    def add_graph(self, allocations: Iterable[Allocation]) -> None:
        while self._coming:
            self._add(self._coming.popleft())
        self._coming.extend(allocations)

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
