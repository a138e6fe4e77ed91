"""Page of the memory that a graph's nodes point to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from graphkit.records import GraphRecord, Segment, count_of
from graphkit.views.formatting import size
from graphkit.views.pages.page import Column, Link, Page, Row, Siblings, count_column
from graphkit.views.selection import NamedGraph

_COLUMNS = (
    Column(name="address and name", least=24),
    count_column("nodes", 1),
    count_column("used", 3, size),
    count_column("size", 2, size),
    Column(name="memory"),
)
_Targets = dict[tuple[int, str, str], set[int]]
"""Indices of the nodes with a pointer, by its address, memory and name."""


def memory_link(graphs: Sequence[NamedGraph], index: int) -> Link:
    """Return the link to the memory of a graph."""
    if graphs[index][1].memory is None:
        return "the record has no memory map of this graph"
    return partial(memory_page, graphs, index)


def memory_page(graphs: Sequence[NamedGraph], index: int) -> Page:
    """Return the segments of memory, and in each the targets of the nodes' pointers."""
    title, graph = graphs[index]
    return Page(
        title=f"memory of {title}",
        facts=tuple(_facts(graph)),
        columns=_COLUMNS,
        rows=tuple(_rows(graph)),
        siblings=Siblings(count=len(graphs), index=index, make=partial(memory_page, graphs)),
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
        nodes = len(set().union(*remaining.values()))
        yield Row(
            key="elsewhere",
            values=("outside of all segments", nodes, None, None, None),
            note="Host memory, and device memory that the allocator has released.",
            make_children=partial(_target_rows, remaining),
        )


def _targets(graph: GraphRecord) -> _Targets:
    found: _Targets = {}
    for node in graph.nodes:
        for argument in node.arguments:
            for pointer in argument.pointers:
                key = (pointer.address, pointer.memory, pointer.name)
                found.setdefault(key, set()).add(node.index)
    return dict(sorted(found.items()))


def _segment(segment: Segment, inside: _Targets) -> Row:
    nodes = len(set().union(*inside.values()))
    return Row(
        key=f"{segment.address:#x}",
        values=(f"{segment.address:#x}", nodes, segment.used, segment.size, f"{segment.pool} pool"),
        note=f"{count_of(len(inside), 'pointer')} into it, from {count_of(nodes, 'node')}",
        make_children=partial(_target_rows, inside) if inside else None,
    )


def _target_rows(targets: _Targets) -> Iterator[Row]:
    for (address, memory, name), nodes in targets.items():
        indices = ", ".join(f"#{index}" for index in sorted(nodes))
        yield Row(
            key=f"{address:#x} {memory} {name}",
            values=(f"{address:#x} {name}", len(nodes), None, None, memory),
            note=f"{name or memory}, argument of {indices}",
            tone="bad" if memory == "freed" else "",
        )
