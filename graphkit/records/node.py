"""A node of a captured graph, and the nodes in time: when each ran, and the gaps between."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Self

from graphkit.records.record import Count, Duration


@dataclass(frozen=True, slots=True, kw_only=True)
class Pointer:
    """An address in an argument of a node.

    Attributes:
        address: The address.
        memory: Kind of memory there: ``weight``, ``input``, ``state``, ``pool`` (the graph's own),
            ``mailbox``, ``external`` (a live allocation without a declared name), ``freed``,
            ``host``.
        name: Name of the memory: a parameter's path, an input field, ``pool+0x1200``.
        offset: Offset of the address in its argument, in bytes.
        size: Upper bound of the bytes from the address to the end of the tensor; 0 if unknown.
    """

    SPARSE: ClassVar[bool] = True
    address: Count
    memory: str
    name: str
    offset: Count = 0
    size: Count = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """One argument of a node.

    Attributes:
        name: Name of the parameter: of an operation on the recorder, of a kernel of Triton or
            torch.compile, of a copy. Empty if unknown, as for other compiled kernels.
        offset: Offset among the kernel's arguments, in bytes.
        size: Size in bytes.
        kind: ``pointer``, ``number``, ``struct``, ``tensor`` (recorder), ``value`` (recorder), or
            ``unreadable``.
        text: The value as text.
        pointers: Addresses in the value.
    """

    SPARSE: ClassVar[bool] = True
    name: str = ""
    offset: Count = 0
    size: Count
    kind: str
    text: str
    pointers: tuple[Pointer, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One node of a graph; on the recorder, one operation.

    Attributes:
        index: Index in ``GraphRecord.nodes``, in order of creation.
        kind: ``kernel``, ``memcpy``, ``memset``, ``host``, ``child graph``, ``conditional``,
            ``event record``, ``event wait``, ``allocation``, ``free``, ``empty``, or ``op``.
        name: Demangled name of the kernel, or the action of the node.
        short_name: Name without templates and arguments.
        grid, block, cluster: Blocks of the grid, threads of a block and blocks of a cluster, as
            (x, y, z); empty if the node has none.
        shared_memory_bytes: Shared memory per block, static and dynamic.
        registers: Registers per thread.
        attributes: Launch attributes that differ from the default.
        arguments: Arguments in the kernel's order.
        module: Path of the module whose forward made it; empty outside of modules.
        op: Operation that made it, such as ``aten::mm``; empty for a kernel launched directly.
        source: Line that called the operation, ``file.py:12 in forward``.
        scope: The user's scopes around it, outermost first, joined by ``/``.
        parent: Index of the node whose child graph or conditional body contains this one.
        duration_us: Median time on the device in microseconds; ``None`` if not measured. A kernel
            that starts while the kernel before it runs (PDL) counts from the end of that kernel.
        start_us: Median start in microseconds after the start of the replay's first node.
    """

    SPARSE: ClassVar[bool] = True
    index: Count
    kind: str
    name: str
    short_name: str
    grid: tuple[Count, ...] = ()
    block: tuple[Count, ...] = ()
    cluster: tuple[Count, ...] = ()
    shared_memory_bytes: Count = 0
    registers: Count = 0
    attributes: Mapping[str, str] = field(default_factory=dict)
    arguments: tuple[Argument, ...] = ()
    module: str = ""
    op: str = ""
    source: str = ""
    scope: str = ""
    parent: Count | None = None
    duration_us: Duration | None = None
    start_us: Duration | None = None

    @property
    def end_us(self) -> float:
        """End in microseconds after the start of the replay; 0 if no time was measured."""
        return (self.start_us or 0.0) + (self.duration_us or 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """A dependency between two nodes.

    Attributes:
        source, target: Indices of nodes.
        kind: ``full``, or ``programmatic`` where the target may begin before the source ends (PDL).
    """

    SPARSE: ClassVar[bool] = True
    source: Count
    target: Count
    kind: str = "full"


_LIMIT_US = 1e12
"""Times from here on, 11 days, are damaged: they have no place on the same scale as others."""


@dataclass(frozen=True, slots=True)
class Gap:
    """A time in which no node runs.

    Attributes:
        begin, us: When it begins and how long it is, in us.
        node: Index of the node that ends it.
    """

    begin: float
    us: float
    node: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """The measured nodes of a graph in time.

    Starts and durations of nodes are medians over the profiled replays, so that the whole may
    differ a little from the median time of these replays.

    Attributes:
        nodes: The nodes whose start and duration were measured, by start.
        gaps: The gaps between them, by time. The only definition of a gap: pages, timelines and
            differences of records show these.
        end_us: When the last node ends; 0 without measured nodes.
    """

    nodes: tuple[Node, ...]
    gaps: tuple[Gap, ...]
    end_us: float

    @classmethod
    def from_nodes(cls, nodes: Iterable[Node]) -> Self:
        """Return the nodes of a graph in time. Nodes with invalid times are omitted."""
        measured = sorted(filter(_is_measured, nodes), key=lambda node: (node.start_us, node.index))
        gaps, reached = [], 0.0
        for node in measured:
            start = node.start_us or 0.0
            if start > reached:
                gaps.append(Gap(reached, start - reached, node.index))
            reached = max(reached, node.end_us)
        return cls(tuple(measured), tuple(gaps), reached)

    @property
    def gap_us(self) -> float:
        """Time in which no node runs."""
        return sum(gap.us for gap in self.gaps)

    @property
    def busy_us(self) -> float:
        """Time in which at least one node runs."""
        return self.end_us - self.gap_us


def _is_measured(node: Node) -> bool:
    return (
        node.start_us is not None
        and node.duration_us is not None
        and 0 <= node.start_us <= node.end_us < _LIMIT_US
    )
