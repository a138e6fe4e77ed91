"""Pages of memory: what the nodes of a graph point to, and the input buffers of a mode."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import NamedTuple

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
_EIGHTHS = " ▁▂▃▄▅▆▇█"
_WIDTH = 20
"""Cells of a picture, as text."""
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
    title, graph = group.graphs[index]
    return group.page(
        index,
        memory_page,
        here={"memory": "this page shows the memory"},
        title=f"memory of {title}",
        crumb="memory",
        facts=tuple(_facts(graph)),
        columns=_columns(len(graph.nodes)),
        rows=tuple(_rows(graph)),
        notes=(_NOTE,),
        empty="the record has no pointers of its nodes",
    )


def _columns(total: int) -> tuple[Column, ...]:
    return (
        Column(name="address and name", most=36, narrow=20),
        count_column("nodes", 2),
        count_column("used", 4, size),
        count_column("size", 3, size),
        Column(name="memory"),
        Column(
            name="uses", show=lambda uses: uses.draw(), rank=1, least=16,
            draw=lambda uses, width: uses.draw(width), axis=("#0", f"#{max(total - 1, 0)}"),
        ),
    )  # fmt: skip


def _facts(graph: GraphRecord) -> Iterator[tuple[str, str]]:
    if graph.memory:
        yield "this graph", size(graph.memory.graph_bytes)
        yield "pool, shared by graphs", size(graph.memory.pool_bytes)


def _rows(graph: GraphRecord) -> Iterator[Row]:
    remaining, total = _targets(graph), len(graph.nodes)
    for segment in graph.memory.segments if graph.memory else ():
        end = segment.address + segment.size
        inside = {
            key: remaining.pop(key) for key in list(remaining) if segment.address <= key[0] < end
        }
        yield _segment(segment, inside, total)
    if remaining:
        nodes = len(set().union(*remaining.values()))
        yield Row(
            key="elsewhere",
            values=("outside of all segments", nodes, None, None, None, _live(remaining, total)),
            note="Host memory, and device memory that the allocator has released.",
            make_children=partial(_target_rows, remaining, total),
        )


def _targets(graph: GraphRecord) -> _Targets:
    targets: _Targets = {}
    for position, node in enumerate(graph.nodes):
        for argument in node.arguments:
            for pointer in argument.pointers:
                key = (pointer.address, pointer.memory, pointer.name)
                targets.setdefault(key, set()).add(position)
    return dict(sorted(targets.items()))


def _live(targets: _Targets, total: int) -> LiveCounts:
    """Return the number of addresses in use at each node, whatever their names are."""
    by_address: dict[int, set[int]] = {}
    for (address, _, _), nodes in targets.items():
        by_address.setdefault(address, set()).update(nodes)
    return live_counts([node_uses(nodes, total) for nodes in by_address.values()], total)


def _segment(segment: Segment, inside: _Targets, total: int) -> Row:
    nodes, live = len(set().union(*inside.values())), _live(inside, total)
    note = f"{count_of(len(inside), 'pointer')} into it, from {count_of(nodes, 'node')}"
    most = max(live.counts, default=0)
    if most:
        addresses = len({address for address, _, _ in inside})
        note = f"{note}; at most {most} of {addresses} addresses in use, at "
        note += f"#{live.counts.index(most)}. {_NOTE}"
    return Row(
        key=f"{segment.address:#x}",
        values=(
            f"{segment.address:#x}", nodes, segment.used, segment.size, f"{segment.pool} pool",
            live if most else None,
        ),
        note=note,
        make_children=partial(_target_rows, inside, total) if inside else None,
    )  # fmt: skip


def _target_rows(targets: _Targets, total: int) -> Iterator[Row]:
    addresses = sorted({address for address, _, _ in targets})
    following = dict(pairwise(addresses))
    for (address, memory, name), nodes in targets.items():
        indices = ", ".join(f"#{index}" for index in sorted(nodes))
        after = following.get(address)
        limit = f"; at most {size(after - address)}, then the next address" if after else ""
        yield Row(
            key=f"{address:#x} {memory} {name}",
            values=(
                f"{address:#x} {name}",
                len(nodes),
                None,
                None,
                memory,
                node_uses(nodes, total),
            ),
            note=f"{name or memory}, argument of {indices}{limit}",
            tone="bad" if memory == "freed" else "",
        )


class Uses(NamedTuple):
    """The nodes that use an address.

    Attributes:
        first, last: Positions of the first and of the last node.
        nodes: Positions of all of them.
        total: Number of nodes of the graph.
    """

    first: int
    last: int
    nodes: tuple[int, ...]
    total: int

    def draw(self, width: int = _WIDTH) -> str:
        """Return blocks where nodes use the address, and shade from the first to the last one."""
        used = {_cell(node, self.total, width) for node in self.nodes}
        begin, end = min(used), max(used)
        return " " * begin + "".join("█" if at in used else "░" for at in range(begin, end + 1))


class LiveCounts(NamedTuple):
    """Number of addresses between their first and their last use, at each node."""

    counts: tuple[int, ...]

    def draw(self, width: int = _WIDTH) -> str:
        """Return the largest number of each cell as a bar of an eighth to a whole cell."""
        total, cells = len(self.counts), [0] * width
        for node, count in enumerate(self.counts):
            cell = _cell(node, total, width)
            cells[cell] = max(cells[cell], count)
        most = max(cells, default=0) or 1
        return "".join(_EIGHTHS[-(-count * 8 // most)] for count in cells).rstrip()


def node_uses(nodes: Iterable[int], total: int) -> Uses:
    """Return the uses by these nodes, at least one, of a graph of ``total`` nodes."""
    positions = tuple(sorted(nodes))
    return Uses(positions[0], positions[-1], positions, total)


def live_counts(uses: Sequence[Uses], total: int) -> LiveCounts:
    """Return how many of the addresses are in use at each of ``total`` nodes."""
    changes = [0] * (total + 1)
    for use in uses:
        changes[use.first] += 1
        changes[use.last + 1] -= 1
    return LiveCounts(tuple(accumulate(changes[:total])))


def _cell(node: int, total: int, width: int) -> int:
    return min(node * width // max(total, 1), max(width - 1, 0))


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
