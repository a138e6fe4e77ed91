"""The memory of a graph pool, to overwrite between replays and to restore."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

import torch

from graphkit.audit.stale_memory.ranges import Poison, Range
from graphkit.graphs import PoolBlock

_CHUNK = 1 << 25
"""Bytes that one step reads or writes, which bounds the memory of its temporary tensors."""


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
