"""Where an address leads: a name that somebody declared, else what the allocator knows of it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphkit.records import Pointer, Segment

_LOWEST_MAPPED, _PAGE_BITS = 1 << 40, 12
"""Below, 64-bit Linux maps nothing unless asked to, and pairs of small ints look like addresses."""

NamedTensors = Mapping[str, Mapping[str, torch.Tensor]]
"""Tensors by kind of memory and name; see ``graphkit.records.Pointer`` for the kinds."""


@dataclass(frozen=True, slots=True)
class Range:
    """A run of addresses.

    Attributes:
        begin, end: The first address, and the first after it.
        memory: Its kind.
        name: What it is called; what lies ``origin`` bytes into that, if ``origin`` is given.
        origin: Where the run begins in what its name means; ``None`` if the name says it all.
    """

    begin: int
    end: int
    memory: str
    name: str
    origin: int | None = None

    def pointer(self, address: int, offset: int) -> Pointer:
        """The address, which lies in this run, as a record says it."""
        into = address - self.begin + (self.origin or 0)
        exact = self.origin is None and into == 0
        name = self.name if exact else f"{self.name}+{into:#x}"
        return Pointer(address=address, memory=self.memory, name=name, offset=offset)


class MemoryMap:
    """Tells what an address leads to.

    Args:
        names: Tensors that have names. Where they overlap, the one that begins last names an
            address, and the shortest of those; of several names for the same bytes, the first.
        segments: The allocator's, as ``torch.cuda.memory_snapshot`` gives them.
        pool: Id of the graph's own pool.
        ask: Says the kind of memory that CUDA knows at an address nobody named, or ``""``.

    Attributes:
        lowest: No smaller number is an address.
        segments: The allocator's, by address.
    """

    def __init__(
        self,
        names: NamedTensors,
        segments: Sequence[Mapping[str, Any]] = (),
        pool: tuple[int, int] | None = None,
        ask: Callable[[int], str] = lambda _address: "",
    ) -> None:
        self.segments = _segments(segments, pool)
        self._known = _Lookup([*_named(names), *_blocks(segments, pool)])
        self._ask, self._asked = ask, dict[int, str]()
        self.lowest = min(_LOWEST_MAPPED, self._known.lowest)

    def find(self, address: int, offset: int = 0) -> Pointer | None:
        """What the address leads to; ``None`` if it is none.

        Args:
            address: Any number.
            offset: Where it stands in its argument.
        """
        found = self._known.find(address)
        if found is not None:
            return found.pointer(address, offset)
        page = address >> _PAGE_BITS
        if page not in self._asked:
            self._asked[page] = self._ask(address) if address else ""
        memory = self._asked[page]
        if not memory:
            return None
        return Pointer(address=address, memory=memory, name=f"{memory} memory", offset=offset)

    def pool_offset(self, address: int) -> int | None:
        """Where in the graph's own pool an address leads; ``None`` if elsewhere."""
        found = self._known.find(address)
        if found is None or found.origin is None:
            return None
        return address - found.begin + found.origin

    def segments_of(self, addresses: Iterable[int]) -> tuple[Segment, ...]:
        """The allocator's segments that any of the addresses lies in."""
        wanted = sorted(addresses)
        return tuple(
            segment
            for segment in self.segments
            if bisect_right(wanted, segment.address + segment.size - 1)
            > bisect_right(wanted, segment.address - 1)
        )


class _Lookup:
    """Finds the innermost run around an address."""

    def __init__(self, ranges: Iterable[Range]) -> None:
        self._pieces = list(_pieces(ranges))
        self._begins = [begin for begin, _, _ in self._pieces]
        self.lowest = self._begins[0] if self._begins else _LOWEST_MAPPED

    def find(self, address: int) -> Range | None:
        at = bisect_right(self._begins, address) - 1
        if at < 0:
            return None
        _, end, found = self._pieces[at]
        return found if address < end else None


def _pieces(ranges: Iterable[Range]) -> Iterable[tuple[int, int, Range]]:
    """Runs, which may lie one inside the other, cut into pieces that do not."""
    around: list[Range] = []
    at = 0
    # Of several names for the same bytes, such as tied weights, the first holds.
    first = {(each.begin, each.end): each for each in reversed(list(ranges))}
    for inner in sorted(first.values(), key=lambda each: (each.begin, -each.end)):
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


def _named(names: NamedTensors) -> Iterable[Range]:
    for memory, tensors in names.items():
        for name, tensor in tensors.items():
            begin = tensor.data_ptr()
            if begin:
                yield Range(begin, begin + max(_extent(tensor), 1), memory, name)


def _extent(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first element to its last."""
    if not tensor.numel():
        return 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((n - 1) * stride for n, stride in steps)) * tensor.element_size()


def _segments(
    segments: Sequence[Mapping[str, Any]], pool: tuple[int, int] | None
) -> tuple[Segment, ...]:
    found = []
    for each in segments:
        kind = _pool_of(each, pool)
        address, size, used = (int(each[key]) for key in ("address", "total_size", "active_size"))
        found.append(Segment(address=address, size=size, used=used, pool=kind))
    return tuple(sorted(found, key=lambda segment: segment.address))


def _pool_of(segment: Mapping[str, Any], pool: tuple[int, int] | None) -> str:
    found = tuple(segment["segment_pool_id"])
    if pool is not None and found == tuple(pool):
        return "graph"
    return "default" if found == (0, 0) else "other"


def _blocks(segments: Sequence[Mapping[str, Any]], pool: tuple[int, int] | None) -> Iterable[Range]:
    """The graph's pool as one run of offsets, and every block of other segments."""
    origin = 0
    for segment in sorted(segments, key=lambda each: int(each["address"])):
        begin, size = int(segment["address"]), int(segment["total_size"])
        if _pool_of(segment, pool) == "graph":
            yield Range(begin, begin + size, "pool", "pool", origin)
            origin += size
            continue
        for block in segment["blocks"]:
            is_live = block["state"] == "active_allocated"
            memory = "external" if is_live else "freed"
            begin, size = block["address"], block["size"]
            yield Range(begin, begin + size, memory, f"{memory} block of {size} bytes")
