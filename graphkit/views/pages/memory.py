"""Pages of memory: what the nodes of a graph point to, and the input buffers of a mode."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import partial
from itertools import pairwise

from graphkit.records import BufferRecord, GraphRecord, ModeRecord, Segment, count_of, extent
from graphkit.views.formatting import size
from graphkit.views.pages.page_model import (
    Column,
    GraphGroup,
    Link,
    Page,
    Row,
    Siblings,
    count_column,
)

_NOTE = (
    "Memory counts as used from the first to the last node that points to it. The record has no "
    "allocations: memory may be held for longer, or be freed and used again in between."
)
_Targets = dict[tuple[int, str, str], set[int]]
"""Positions of the nodes with a pointer, by its address, memory and name."""
_COLUMNS = (
    Column(name="address and name", most=36, narrow=20, least=20),
    count_column("nodes", 2),
    Column(name="used by", rank=1),
    count_column("used", 4, size),
    count_column("size", 3, size),
    Column(name="memory"),
)
_BUFFER_COLUMNS = (
    Column(name="field"),
    Column(name="dtype", rank=1, most=12),
    Column(name="shape", show=extent, rank=6),
    Column(name="axis", rank=2, most=8),
    count_column("pad", 4, "{:g}".format),
    Column(name="address", show="{:#x}".format, rank=3),
    count_column("size", 5, size),
    Column(name="shared by", least=16),
)


def memory_link(group: GraphGroup, index: int) -> Link:
    """Return the link to the memory of a graph."""
    if group.graphs[index][1].memory is None:
        return "the record has no memory map of this graph"
    return partial(memory_page, group, index)


def memory_page(group: GraphGroup, index: int) -> Page:
    """Return the segments of memory, and in each the targets of the nodes' pointers."""
    graph = group.graphs[index][1]
    return group.page(
        index,
        memory_page,
        key="memory",
        crumb="memory",
        facts=tuple(_facts(graph)),
        columns=_COLUMNS,
        rows=tuple(_rows(graph)),
        notes=(_NOTE,),
        empty="the record has no pointers of its nodes",
    )


def _facts(graph: GraphRecord) -> Iterator[tuple[str, str]]:
    if graph.memory:
        yield "this graph", size(graph.memory.graph_bytes)
        yield "pool, shared by graphs", size(graph.memory.pool_bytes)


def _rows(graph: GraphRecord) -> Iterator[Row]:
    remaining = _targets(graph)
    for segment in graph.memory.segments if graph.memory else ():
        end = segment.address + segment.size
        inside = {
            key: remaining.pop(key) for key in list(remaining) if segment.address <= key[0] < end
        }
        yield _segment(segment, inside)
    if remaining:
        nodes = set().union(*remaining.values())
        yield Row(
            key="elsewhere",
            values=("outside of all segments", len(nodes), _first_to_last(nodes), None, None, None),
            note="Host memory, and device memory that the allocator has released.",
            make_children=partial(_target_rows, remaining),
        )


def _targets(graph: GraphRecord) -> _Targets:
    targets: _Targets = {}
    for position, node in enumerate(graph.nodes):
        for argument in node.arguments:
            for pointer in argument.pointers:
                key = (pointer.address, pointer.memory, pointer.name)
                targets.setdefault(key, set()).add(position)
    return dict(sorted(targets.items()))


def _segment(segment: Segment, inside: _Targets) -> Row:
    nodes = set().union(*inside.values())
    note = f"{count_of(len(inside), 'pointer')} into it, from {count_of(len(nodes), 'node')}"
    return Row(
        key=f"{segment.address:#x}",
        values=(
            f"{segment.address:#x}", len(nodes), _first_to_last(nodes), segment.used, segment.size,
            f"{segment.pool} pool",
        ),
        note=f"{note}. {_NOTE}" if inside else note,
        make_children=partial(_target_rows, inside) if inside else None,
    )  # fmt: skip


def _target_rows(targets: _Targets) -> Iterator[Row]:
    addresses = sorted({address for address, _, _ in targets})
    following = dict(pairwise(addresses))
    for (address, memory, name), nodes in targets.items():
        indices = ", ".join(f"#{index}" for index in sorted(nodes))
        after = following.get(address)
        limit = f"; at most {size(after - address)}, then the next address" if after else ""
        yield Row(
            key=f"{address:#x} {memory} {name}",
            values=(
                f"{address:#x} {name}", len(nodes), _first_to_last(nodes), None, None, memory,
            ),
            note=f"{name or memory}, argument of {indices}{limit}",
            tone="bad" if memory == "freed" else "",
        )  # fmt: skip


def _first_to_last(nodes: Collection[int]) -> str | None:
    """Return the first and the last node, between which the memory counts as used."""
    first, last = min(nodes, default=None), max(nodes, default=None)
    if first is None:
        return None
    return f"#{first}" if first == last else f"#{first} to #{last}"


def buffers_link(modes: Sequence[ModeRecord], name: str) -> Link:
    """Return the link to the buffers of a mode."""
    index = next((index for index, mode in enumerate(modes) if mode.mode == name), None)
    if index is None:
        return "the record has no input buffers of this graph"
    return partial(buffers_page, modes, index)


def buffers_page(modes: Sequence[ModeRecord], index: int) -> Page:
    """Return the buffers of one of the modes, in the order of their declaration."""
    mode = modes[index]
    return Page(
        title=f"buffers of {mode.mode}",
        facts=(
            ("tokens per request", f"{mode.tokens_per_request}"),
            ("all inputs", size(mode.input_bytes)),
        ),
        columns=_BUFFER_COLUMNS,
        rows=tuple(_buffer(buffer, mode, modes) for buffer in mode.buffers),
        siblings=Siblings(count=len(modes), index=index, make=partial(buffers_page, modes)),
        empty="the record has no buffers of this mode",
    )


def _buffer(buffer: BufferRecord, mode: ModeRecord, modes: Sequence[ModeRecord]) -> Row:
    shared = ", ".join(_shared_by(buffer, mode, modes))
    return Row(
        key=buffer.field,
        values=(
            buffer.field, buffer.dtype, buffer.shape, buffer.axis, buffer.pad, buffer.address,
            buffer.size, shared,
        ),
        note=f"{buffer.meaning}; {buffer.dtype} {extent(buffer.shape)}, {size(buffer.size)} at "
        f"{buffer.address:#x}" + (f"; shared by {shared}" if shared else ""),
    )  # fmt: skip


def _shared_by(
    buffer: BufferRecord, mode: ModeRecord, modes: Sequence[ModeRecord]
) -> Iterator[str]:
    """Yield the fields of other modes that overlap the buffer in memory."""
    if buffer.is_bound:
        yield "bound: another graph writes it"
    end = buffer.address + buffer.size
    for other in modes:
        for shared in other.buffers if other is not mode else ():
            if buffer.address < shared.address + shared.size and shared.address < end:
                yield other.mode if shared.field == buffer.field else f"{other.mode}.{shared.field}"
