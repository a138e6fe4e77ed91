"""The memory that a check of a foreign graph compares, copies and overwrites."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from graphkit.audit.audit_log import NotChecked
from graphkit.audit.bits import CHUNK
from graphkit.audit.foreign.audits.followed_graph import FollowedGraph, blocks_of, pool_id
from graphkit.audit.foreign.audits.watched_memory import WatchedMemory
from graphkit.audit.live_tensors import LiveTensors
from graphkit.audit.stale_memory.pool_memory import Range, joined, segment_ranges, without

_LEAST_BYTES = 1 << 29
"""Memory that checksums take for temporary tensors."""
_HOST_BYTES = 64 << 20
"""Largest range of pinned memory that is restored as a whole."""


@dataclass(frozen=True, slots=True)
class CheckedMemory:
    """The memory of one check.

    Attributes:
        watched: Memory that replays may write or read, of the device and of the host.
        scratch: Ranges of the pool that a replay must write before it reads them.
        mapped: Ranges of torch's allocator.
        room: Bytes that copies may take besides two of the scratch memory.
    """

    watched: WatchedMemory
    scratch: Sequence[Range]
    mapped: Sequence[Range]
    room: int


def checked_memory(device: Any, followed: FollowedGraph, limit: int) -> CheckedMemory:
    """Return the memory of a check, whose copies may take ``limit`` bytes.

    Raises:
        NotChecked: The check would take more, or the size of memory that the graph points to is
            unknown.
    """
    segments = [
        segment
        for segment in device.segments()
        if (segment["active_size"] or pool_id(segment) == followed.pool)
        and device.is_mapped(int(segment["address"]))
    ]
    live = LiveTensors()
    scratch = followed.scratch(segments, live.storages())
    del live  # its references would keep tensors alive
    mapped = joined(segment_ranges(segments))
    foreign, host = _foreign_ranges(device, followed, mapped), _host_ranges(device, followed)
    parts = [device.device_bytes(*span) for span in (*without(mapped, scratch), *foreign)]
    parts += [device.host_bytes(*span) for span in host]
    if limit < _LEAST_BYTES:
        raise NotChecked(f"a check may use {mib(limit)}, and needs {mib(_LEAST_BYTES)}")
    size = sum(end - begin for begin, end in scratch)
    if 2 * size > limit:
        raise NotChecked(
            f"the pool has {mib(size)} of scratch memory, more than half of the {mib(limit)} that "
            "the check may use"
        )
    blocks = [(block.begin, block.end) for block in blocks_of(segments)]
    room = limit - 2 * size
    copied = list(_copied(parts, [*blocks, *foreign, *host], room // 2))
    return CheckedMemory(WatchedMemory(parts, copied), scratch, mapped, room)


def mib(num_bytes: int) -> str:
    """Return a number of bytes in MiB, as text."""
    return f"{num_bytes / (1 << 20):,.1f} MiB"


def _foreign_ranges(device: Any, followed: FollowedGraph, mapped: Sequence[Range]) -> list[Range]:
    """Return the device memory outside of torch's allocator that the graph points to."""
    ranges = []
    for reference in followed.references():
        pointer = reference.pointer
        is_mapped = any(begin <= pointer.address < end for begin, end in mapped)
        if pointer.memory == "host" or is_mapped:
            continue
        span = device.allocation_at(pointer.address)
        if span is None or not device.is_mapped(span[0]):
            if not reference.is_set:
                continue
            raise NotChecked(f"node {reference.node.index} points to memory whose size is unknown")
        ranges.append((span[0] // 8 * 8, span[1] // 8 * 8))
    return without(joined(ranges), mapped)


def _host_ranges(device: Any, followed: FollowedGraph) -> list[Range]:
    """Return the pinned host memory that the graph points to."""
    ranges = []
    for reference in followed.references():
        if reference.pointer.memory != "host" or not reference.is_set:
            continue
        span = device.allocation_at(reference.pointer.address)
        if span is None or span[1] - span[0] > _HOST_BYTES:
            raise NotChecked(
                f"node {reference.node.index} points to host memory that is too large to copy"
            )
        ranges.append(span)
    return joined(ranges)


def _copied(
    parts: Sequence[torch.Tensor], blocks: Sequence[Range], max_bytes: int
) -> Iterator[list[Range]]:
    """Yield the ranges of each part to copy: small blocks first, until ``max_bytes`` are reached.

    Small blocks hold inputs and state, the largest ones weights and caches.
    """
    sizes = sorted(end - begin for begin, end in blocks)
    # A block that begins within a chunk needs one more.
    totals = accumulate(size + CHUNK for size in sizes)
    fitting = [size for size, total in zip(sizes, totals, strict=True) if total <= max_bytes]
    largest = fitting[-1] if fitting else 0
    small = joined(span for span in blocks if span[1] - span[0] <= largest)
    for part in parts:
        first = part.data_ptr()
        end = first + len(part)
        at = bisect_right(small, first, key=lambda span: span[1])
        inside = small[at : bisect_left(small, end, key=lambda span: span[0])]
        yield [(max(span[0], first) - first, min(span[1], end) - first) for span in inside]
