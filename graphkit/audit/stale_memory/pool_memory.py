"""Memory of a graph pool: what may be overwritten between replays, with what, and its copy."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from graphkit.graphs import Allocation, PoolBlock
from graphkit.graphs.operations import extent_bytes

UNIT = 512
"""Bytes that are searched as one; the allocator of CUDA memory rounds sizes up to it."""

Range = tuple[int, int]
"""Address of the first byte, and the one after the last byte."""
_CHUNK = 1 << 25
"""Bytes that one step reads or writes, which bounds the memory of its temporary tensors."""


@dataclass(frozen=True, slots=True)
class Fill:
    """Content to overwrite memory with.

    Attributes:
        text: What the content is, such as ``zeros``.
        word: Eight bytes that are repeated, as an int.
        only_floats: Whether it fits only memory that holds floating-point numbers.
    """

    text: str
    word: int
    only_floats: bool = False


FILLS = (
    Fill("zeros", 0),
    # 1, 2, 0.5 and 0.25 in bfloat16; 2.004 and 0.2505 in float32; positive in every dtype.
    Fill("other numbers", 0x3E80_3F00_4000_3F80, only_floats=True),
    Fill("NaN", 0x7FFF_7FFF_7FFF_7FFF, only_floats=True),
)
"""Contents to try, in this order.

A wrong index makes a kernel fault, and a wrong lock makes it wait for ever; both end the process.
Zero is valid as an index, a length, a flag, an unlocked lock and a number, so it may be written
anywhere. Memory that holds zeros anyway needs another content. That is written only where captures
allocated floating-point numbers, and only after zeros changed nothing there: an index or a length
that is computed from them would have changed with zeros, or is not used.
"""


@dataclass(frozen=True, slots=True)
class Poison:
    """Memory to overwrite before a replay: ``ranges`` in ascending order."""

    fill: Fill
    ranges: tuple[Range, ...]

    @property
    def units(self) -> int:
        """Number of units; a range begins with a new one, which ends at a multiple of ``UNIT``."""
        return sum(_units(*span) for span in self.ranges)

    def first(self, units: int) -> Poison:
        """Return the overwriting of the first units alone."""
        kept, left = [], units
        for begin, end in self.ranges:
            if left > 0:
                kept.append((begin, min((begin // UNIT + left) * UNIT, end)))
            left -= _units(begin, end)
        return replace(self, ranges=tuple(kept))

    def unit(self, index: int) -> Range:
        """Return the range of one unit."""
        return without(self.first(index + 1).ranges, self.first(index).ranges)[0]


def ranges_to_fill(
    fill: Fill,
    blocks: Sequence[PoolBlock],
    kept: Iterable[Range],
    own: Sequence[Allocation],
    others: Sequence[Allocation],
) -> tuple[Range, ...]:
    """Return the ranges of pool memory that a fill may overwrite.

    ``kept`` ranges are left out. ``own`` are allocations of the captures of the graph that is
    replayed, ``others`` those of all graphs of the pool, in the order of their captures.
    """
    ranges: Sequence[Range] = sorted((block.begin, block.end) for block in blocks)
    if fill.only_floats:
        floats = sorted(_float_ranges(blocks, own, others))
        ranges = without(ranges, without(ranges, floats))
    return tuple(without(ranges, kept))


def _float_ranges(
    blocks: Sequence[PoolBlock], own: Sequence[Allocation], others: Sequence[Allocation]
) -> Iterator[Range]:
    """Yield the ranges in which a stale value is a floating-point number.

    A live block holds the tensor that was allocated there last. Scratch memory holds the results of
    the replay itself: those that it reads before it writes them are uninitialised.
    """
    last = {allocation.begin: allocation for allocation in others}
    live = [block for block in blocks if block.is_live]
    for block in live:
        if block.begin in last and last[block.begin].dtype.is_floating_point:
            yield block.begin, block.end
    floats = [(each.begin, each.end) for each in own if each.dtype.is_floating_point]
    holes = [(block.begin, block.end) for block in live]
    holes += [
        (allocation.begin, allocation.end)
        for allocation in own
        if not (allocation.is_initialised or allocation.dtype.is_floating_point)
    ]
    yield from without(floats, holes)


def without(ranges: Iterable[Range], holes: Iterable[Range]) -> list[Range]:
    """Return what remains of each range outside of the holes."""
    merged, remaining = joined(holes), []
    for begin, end in ranges:
        at = begin
        for hole in merged[bisect_right(merged, begin, key=lambda hole: hole[1]) :]:
            if hole[0] >= end:
                break
            if at < hole[0]:
                remaining.append((at, hole[0]))
            at = hole[1]
        if at < end:
            remaining.append((at, end))
    return remaining


def joined(ranges: Iterable[Range]) -> list[Range]:
    """Return ranges in ascending order, those that touch or overlap as one."""
    merged: list[Range] = []
    for begin, end in sorted(ranges):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged


def segment_ranges(segments: Iterable[Mapping[str, Any]]) -> list[Range]:
    """Return the ranges of segments of torch's allocator."""
    begins = ((int(segment["address"]), int(segment["total_size"])) for segment in segments)
    return [(begin, begin + size) for begin, size in begins]


def tensor_range(tensor: torch.Tensor) -> Range:
    """Return the range from a tensor's first element to the end of its last."""
    return tensor.data_ptr(), tensor.data_ptr() + extent_bytes(tensor)


def _units(begin: int, end: int) -> int:
    return -(-end // UNIT) - begin // UNIT


class PoolMemory:
    """Blocks of a pool and a copy of their bytes, as of construction.

    Args:
        blocks: The blocks.
        device_segments: Address ranges of device memory. A word in the pool that holds such an
            address is never overwritten: a kernel that follows it would fault.
    """

    def __init__(self, blocks: Sequence[PoolBlock], device_segments: Sequence[Range] = ()) -> None:
        self.blocks = sorted(blocks, key=lambda block: block.begin)
        self._saved = [block.data.clone() for block in self.blocks]
        self._addresses = [_address_words(saved, device_segments) for saved in self._saved]

    def restore(self) -> None:
        """Restore all bytes. Enqueues the copies on the current stream."""
        for block, saved in zip(self.blocks, self._saved, strict=True):
            block.data.copy_(saved)

    def overwrite(self, poison: Poison) -> None:
        """Write a poison's fill to its ranges, except over addresses of device memory."""
        for part in self.parts(poison.ranges):
            for begin in range(0, len(part), _CHUNK):
                chunk = part[begin : begin + _CHUNK]
                first = chunk.data_ptr() % 8
                words = torch.full((len(chunk) // 8 + 2,), poison.fill.word, device=part.device)
                chunk.copy_(words.view(torch.uint8)[first : first + len(chunk)])
        for block, saved, words in zip(self.blocks, self._saved, self._addresses, strict=True):
            if len(words):
                block.data.view(torch.int64)[words] = saved.view(torch.int64)[words]

    def parts(self, ranges: Sequence[Range]) -> Iterator[torch.Tensor]:
        """Yield the bytes of the pool in each of the ranges, uint8 views."""
        for begin, end in ranges:
            first = bisect_right(self.blocks, begin, key=lambda block: block.end)
            for block in self.blocks[first:]:
                if block.begin >= end:
                    break
                yield block.data[max(begin - block.begin, 0) : end - block.begin]

    def block_at(self, address: int) -> PoolBlock:
        """Return the block that an address is in."""
        return self.blocks[bisect_right(self.blocks, address, key=lambda block: block.end)]


def _address_words(data: torch.Tensor, segments: Sequence[Range]) -> torch.Tensor:
    """Return the indices of the eight-byte words that are addresses in one of the segments."""
    if not segments:
        return torch.empty(0, dtype=torch.int64)
    edges = sorted(segments)
    begins, ends = (torch.tensor(edge, device=data.device) for edge in zip(*edges, strict=True))
    indices = []
    for index, words in enumerate(data.view(torch.int64).split(_CHUNK // 8)):
        at = torch.bucketize(words, begins, right=True) - 1
        is_address = (at >= 0) & (words < ends[at.clamp(min=0)])
        indices.append(is_address.nonzero()[:, 0] + index * (_CHUNK // 8))
    return torch.cat(indices)
