"""What is inside one captured graph: its nodes, what made them, and what they cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from graphkit.records.environment import Environment
from graphkit.records.json_text import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Pointer:
    """An address that a node was given.

    Attributes:
        address: Where it leads.
        memory: What kind of memory that is: ``weight``, ``input``, ``state``, ``pool`` (the
            graph's own), ``mailbox``, ``external`` (a live allocation that nobody named),
            ``freed``, ``host``.
        name: What lies there: a parameter's path, an input field, ``pool+0x1200``.
        offset: Where in its argument the address stands, in bytes.
    """

    SPARSE: ClassVar[bool] = True
    address: int
    memory: str
    name: str
    offset: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """One argument of a node.

    Attributes:
        name: The parameter's name where it is known; empty for a compiled kernel's.
        offset: Where it begins among the kernel's arguments, in bytes.
        size: Its bytes.
        kind: ``pointer``, ``number``, ``struct``, ``tensor`` (recorder), ``value`` (recorder), or
            ``unreadable``.
        text: Its value for people.
        pointers: The addresses in it.
    """

    SPARSE: ClassVar[bool] = True
    name: str = ""
    offset: int = 0
    size: int
    kind: str
    text: str
    pointers: tuple[Pointer, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One node of a graph; one operation on the recorder.

    Attributes:
        index: Its place in ``GraphRecord.nodes``, in order of creation.
        kind: ``kernel``, ``memcpy``, ``memset``, ``host``, ``child graph``, ``conditional``,
            ``event record``, ``event wait``, ``allocation``, ``free``, ``empty``, or ``op``.
        name: The kernel's demangled name, or what the node does.
        short_name: The same without templates and arguments.
        grid, block, cluster: Blocks, threads and blocks per cluster, x y z; empty if it has none.
        shared_memory_bytes: Per block, static and dynamic.
        registers: Per thread.
        attributes: Launch attributes that are not as usual.
        arguments: In the kernel's order.
        module: Path of the module whose forward made it; empty outside of modules.
        op: The operation that made it, such as ``aten::mm``; empty for a kernel launched directly.
        source: The line that called for it, ``file.py:12 in forward``.
        scope: The user's scopes around it, outermost first, joined by ``/``.
        parent: Index of the node whose child graph or conditional body holds this one.
        duration_us: Median time on the device; ``None`` if not measured.
        start_us: Median start after the replay's first node.
    """

    SPARSE: ClassVar[bool] = True
    index: int
    kind: str
    name: str
    short_name: str
    grid: tuple[int, ...] = ()
    block: tuple[int, ...] = ()
    cluster: tuple[int, ...] = ()
    shared_memory_bytes: int = 0
    registers: int = 0
    attributes: Mapping[str, str] = field(default_factory=dict)
    arguments: tuple[Argument, ...] = ()
    module: str = ""
    op: str = ""
    source: str = ""
    scope: str = ""
    parent: int | None = None
    duration_us: float | None = None
    start_us: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """An order between two nodes.

    Attributes:
        source, target: Indices of nodes.
        kind: ``full``, or ``programmatic`` where the target may begin before the source ends (PDL).
    """

    SPARSE: ClassVar[bool] = True
    source: int
    target: int
    kind: str = "full"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """What replays cost on the device.

    Attributes:
        replays: How many were measured.
        p50_us, p95_us: A replay, from its first node's start to its last node's end.
        busy_us: Time in which at least one node ran, of the median replay.
        gap_us: The rest of it.
        critical_path: Indices of the nodes on the longest way through the edges.
        critical_us: Their durations added up.
        bound_by: How durations found their nodes: ``order``, or ``name and grid``.
    """

    replays: int
    p50_us: float
    p95_us: float
    busy_us: float
    gap_us: float
    critical_path: tuple[int, ...]
    critical_us: float
    bound_by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A piece of device memory that a graph points into.

    Attributes:
        address: Where it begins.
        size: Its bytes.
        used: Bytes of it that are allocated.
        pool: ``graph`` for the graph's own pool, else ``default`` or ``other``.
    """

    address: int
    size: int
    used: int
    pool: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphMemory:
    """The memory of a graph.

    Attributes:
        graph_bytes: Bytes by which the pool grew when it was captured.
        pool_bytes: Bytes of the whole pool, which other graphs may share.
        segments: Those that its nodes point into, by address.
    """

    graph_bytes: int
    pool_bytes: int
    segments: tuple[Segment, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphRecord(Record):
    """One captured graph.

    Attributes:
        name: ``TARGET_VERIFY 8`` for one of a runner's, else where it was captured.
        backend: ``cuda`` or ``recorder``.
        environment: Where.
        mode: The forward mode's name; empty for a graph that no runner captured.
        batch_size: The captured size; 0 for a graph that no runner captured.
        captured_at: The line that captured it, if that is known.
        process: Index of the process in a ``RecordingRecord``.
        nodes: In order of creation; those of child graphs and bodies after all of their parent's.
        edges: Between nodes of the same graph or body.
        timing: ``None`` if no replay was measured.
        memory: ``None`` on the recorder.
    """

    KIND: ClassVar[str] = "graph"
    name: str
    backend: str
    environment: Environment
    mode: str = ""
    batch_size: int = 0
    captured_at: str = ""
    process: int = 0
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...] = ()
    timing: Timing | None = None
    memory: GraphMemory | None = None
