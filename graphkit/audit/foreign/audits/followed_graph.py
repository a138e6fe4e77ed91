"""A graph of the program, from its capture to its end."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from graphkit.audit.foreign.audits.captured_numbers import Calls, CapturedNumber
from graphkit.audit.foreign.audits.device import PoolId, Segments
from graphkit.audit.foreign.audits.static_memory import StaticMemory
from graphkit.audit.replayable_graph import Reference, distinct, references
from graphkit.audit.stale_memory.pool_memory import UNIT, Range, without
from graphkit.graphs import Allocation
from graphkit.records import GraphRecord

DEFAULT_POOL: PoolId = (0, 0)


@dataclass(slots=True, kw_only=True, eq=False)
class FollowedGraph:
    """What is known of a captured graph.

    Attributes:
        name: Line that captured it; captures of the same line are numbered from the second one.
        graph: The ``CUDAGraph``.
        record: Its nodes.
        pool: Id of its memory pool.
        kept: Ranges of the pool that held tensors when the capture began or ended: inputs, outputs
            and state.
        allocations: What operations of the capture allocated.
        generators: Random generators that the program registered with the graph.
        captured_at: Line that captured it.
        numbers: Numbers of the host that its operations got.
        calls: Name and numbers of each operation.
        memories: The storages that it points to, by address of the pointer.
        replays: Number of replays so far.
        next_check: Number of the replay before which it is checked next.
        next_poison: Number of the replay at which memory is poisoned next; 0 for never.
        is_checked_next: Whether something has changed since that its pointers may show.
        is_reset: Whether the program has deleted the graph that the object held.
    """

    name: str
    graph: weakref.ReferenceType[Any]
    record: GraphRecord
    pool: PoolId
    kept: tuple[Range, ...]
    allocations: tuple[Allocation, ...] = ()
    generators: tuple[Any, ...] = ()
    captured_at: str = ""
    numbers: tuple[CapturedNumber, ...] = ()
    calls: Calls = ()
    memories: dict[int, StaticMemory] = field(default_factory=dict)
    replays: int = 0
    next_check: int = 1
    next_poison: int = 1
    is_checked_next: bool = False
    is_reset: bool = False

    @property
    def is_alive(self) -> bool:
        """Whether the program still has the graph."""
        return not self.is_reset and self.graph() is not None

    def references(self) -> Sequence[Reference]:
        """Return the distinct addresses outside of the pool, with the first node that has each.

        A node where the address is set comes before nodes where it may be a leftover. It is set if
        it is in an operand of the node's operation: kernels for tensors that are broadcast have the
        addresses of their operands behind strides that torch sets in part.
        """
        # Without names of memory, the inspection knows the sizes of operands alone.
        return distinct(
            replace(reference, is_set=reference.pointer.size > 0 or reference.is_set)
            for reference in references(self.record)
            if reference.pointer.memory != "pool"
        )

    def scratch(self, segments: Segments, storages: Iterable[Range]) -> list[Range]:
        """Return the ranges of the pool that a replay must write before it reads them.

        These are the blocks that held nothing when the capture began, nothing when it ended, and
        hold nothing now.

        Args:
            segments: The allocator's segments now.
            storages: The storages of all live tensors. Some own memory that the allocator counts as
                free, as the outputs of CUDA graph trees do.
        """
        free = [
            (block.begin, block.end)
            for block in blocks_of(segments)
            if block.pool == self.pool and not block.is_active
        ]
        whole_units = (
            (begin // UNIT * UNIT, -(-end // UNIT) * UNIT) for begin, end in (*self.kept, *storages)
        )
        return without(sorted(free), whole_units)


def pool_id(segment: Any) -> PoolId:
    """Return the id of the pool that a segment belongs to."""
    first, second = segment["segment_pool_id"]
    return int(first), int(second)


class Block(NamedTuple):
    """A block of torch's allocator.

    Attributes:
        state: ``active_allocated`` if it holds a tensor or a workspace, ``inactive`` if it is free.
    """

    begin: int
    end: int
    state: str
    pool: PoolId

    @property
    def is_active(self) -> bool:
        """Whether it is not free, or not free yet."""
        return self.state != "inactive"


def blocks_of(segments: Segments) -> Iterator[Block]:
    """Yield the blocks of segments of the allocator."""
    for segment in segments:
        for block in segment["blocks"]:
            begin, end = block["address"], block["address"] + block["size"]
            yield Block(begin, end, block["state"], pool_id(segment))


def held_ranges(segments: Segments) -> Iterator[tuple[PoolId, Range]]:
    """Yield pool and range of each block that holds a tensor or a workspace."""
    for block in blocks_of(segments):
        if block.state == "active_allocated":
            yield block.pool, (block.begin, block.end)
