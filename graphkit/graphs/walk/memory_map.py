"""Names of addresses: of tensors that have names, otherwise of the allocator's blocks."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphkit.graphs.operations import extent_bytes
from graphkit.records import Pointer, Segment

_LOWEST_MAPPED, _PAGE_BITS = 1 << 40, 12
"""64-bit Linux maps little below, and pairs of small ints look like addresses there."""

NamedTensors = Mapping[str, Mapping[str, torch.Tensor]]
"""Tensors by kind of memory and name; see ``graphkit.records.Pointer`` for the kinds."""


@dataclass(frozen=True, slots=True)
class AddressRange:
    """A named range of addresses.

    Attributes:
        begin, end: The first address, and the first one after the range.
        memory: Kind of memory, as in ``graphkit.records.Pointer``.
        name: Name of the memory.
        origin: Offset of ``begin`` in the memory that is named; ``None`` if the range is all of it.
        is_tensor: Whether it is the memory of one tensor.
    """

    begin: int
    end: int
    memory: str
    name: str
    origin: int | None = None
    is_tensor: bool = False

    def pointer(self, address: int, offset: int) -> Pointer:
        """Return the record of an address in this range, ``offset`` bytes into its argument."""
        into = address - self.begin + (self.origin or 0)
        is_whole = self.origin is None and into == 0
        name = self.name if is_whole else f"{self.name}+{into:#x}"
        size = self.end - address if self.is_tensor else 0
        return Pointer(address=address, memory=self.memory, name=name, offset=offset, size=size)


class MemoryMap:
    """Finds the memory that an address points to.

    Args:
        names: Named tensors. If several contain an address, the one that begins last is used, then
            the shortest, then the first given.
        segments: The allocator's segments, from ``torch.cuda.memory_snapshot``.
        pool: Id of the graph's own pool.
        query_kind: Returns the kind of memory at an address that has no name, or ``""``. Called at
            most once per page.

    Attributes:
        lowest: Smallest possible address.
        segments: Records of the allocator's segments, by address.
    """

    def __init__(
        self,
        names: NamedTensors,
        segments: Sequence[Mapping[str, Any]] = (),
        pool: tuple[int, int] | None = None,
        query_kind: Callable[[int], str] = lambda _address: "",
    ) -> None:
        self.segments = _segment_records(segments, pool)
        self._ranges = _RangeLookup([*_tensor_ranges(names), *_block_ranges(segments, pool)])
        self._query_kind, self._page_kinds = query_kind, dict[int, str]()
        self.lowest = min(_LOWEST_MAPPED, self._ranges.lowest)

    def find(self, address: int, offset: int = 0) -> Pointer | None:
        """Return the record of any number as an address; ``None`` outside of known memory."""
        innermost = self._ranges.find(address)
        if innermost is not None:
            return innermost.pointer(address, offset)
        page = address >> _PAGE_BITS
        if page not in self._page_kinds:
            self._page_kinds[page] = self._query_kind(address) if address else ""
        memory = self._page_kinds[page]
        if not memory:
            return None
        return Pointer(address=address, memory=memory, name=f"{memory} memory", offset=offset)

    def range_of(self, address: int) -> AddressRange | None:
        """Return the innermost known range around an address; ``None`` outside of all."""
        return self._ranges.find(address)

    def segments_with(self, addresses: Iterable[int]) -> tuple[Segment, ...]:
        """Return the allocator's segments that contain any of the addresses."""
        wanted = sorted(addresses)
        return tuple(
            segment
            for segment in self.segments
            if bisect_right(wanted, segment.address + segment.size - 1)
            > bisect_right(wanted, segment.address - 1)
        )


class _RangeLookup:
    """Finds the innermost range around an address."""

    def __init__(self, ranges: Iterable[AddressRange]) -> None:
        self._pieces = list(_disjoint_pieces(ranges))
        self._begins = [begin for begin, _, _ in self._pieces]
        self.lowest = self._begins[0] if self._begins else _LOWEST_MAPPED

    def find(self, address: int) -> AddressRange | None:
        at = bisect_right(self._begins, address) - 1
        if at < 0:
            return None
        _, end, innermost = self._pieces[at]
        return innermost if address < end else None


def _disjoint_pieces(ranges: Iterable[AddressRange]) -> Iterable[tuple[int, int, AddressRange]]:
    """Cut nested and overlapping ranges into disjoint pieces, each of the innermost range."""
    around: list[AddressRange] = []
    at = 0
    # Of several names for the same bytes, such as tied weights, the first one counts.
    first = {(memory.begin, memory.end): memory for memory in reversed(list(ranges))}
    for inner in sorted(first.values(), key=lambda memory: (memory.begin, -memory.end)):
        while around and around[-1].end <= inner.begin:
            ended = around.pop()
            if at < ended.end:
                yield at, ended.end, ended
                at = ended.end
        if around and at < inner.begin:
            yield at, inner.begin, around[-1]
        around.append(inner)
        at = inner.begin
    for ended in reversed(around):
        if at < ended.end:
            yield at, ended.end, ended
            at = ended.end


def _tensor_ranges(names: NamedTensors) -> Iterable[AddressRange]:
    for memory, tensors in names.items():
        for name, tensor in tensors.items():
            begin = tensor.data_ptr()
            if begin:
                end = begin + max(extent_bytes(tensor), 1)
                yield AddressRange(begin, end, memory, name, is_tensor=True)


def _segment_records(
    segments: Sequence[Mapping[str, Any]], pool: tuple[int, int] | None
) -> tuple[Segment, ...]:
    records = []
    for segment in segments:
        kind = _pool_kind(segment, pool)
        address, size, used = (
            int(segment[key]) for key in ("address", "total_size", "active_size")
        )
        records.append(Segment(address=address, size=size, used=used, pool=kind))
    return tuple(sorted(records, key=lambda record: record.address))


def _pool_kind(segment: Mapping[str, Any], pool: tuple[int, int] | None) -> str:
    segment_pool = tuple(segment["segment_pool_id"])
    if pool is not None and segment_pool == tuple(pool):
        return "graph"
    return "default" if segment_pool == (0, 0) else "other"


def _block_ranges(
    segments: Sequence[Mapping[str, Any]], pool: tuple[int, int] | None
) -> Iterable[AddressRange]:
    """Yield the segments of the graph's pool, and the blocks of all other segments."""
    origin = 0
    for segment in sorted(segments, key=lambda segment: int(segment["address"])):
        begin, size = int(segment["address"]), int(segment["total_size"])
        if _pool_kind(segment, pool) == "graph":
            yield AddressRange(begin, begin + size, "pool", "pool", origin)
            origin += size
            continue
        for block in segment["blocks"]:
            is_allocated = block["state"] == "active_allocated"
            memory = "external" if is_allocated else "freed"
            begin, size = block["address"], block["size"]
            yield AddressRange(begin, begin + size, memory, f"{memory} block of {size} bytes")
