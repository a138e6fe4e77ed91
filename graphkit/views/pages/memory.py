"""The view of the memory that a graph's nodes point into."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from graphkit.records import GraphRecord, Pointer, Segment
from graphkit.views.figures import count_of, size
from graphkit.views.pages.page import Beside, Column, Item, Link, Page
from graphkit.views.selection import Titled

_COLUMNS = (
    Column(name="address and name", least=24),
    Column(name="nodes", show="{:,}".format, is_number=True, rank=1),
    Column(name="used", show=size, is_number=True, rank=3),
    Column(name="size", show=size, is_number=True, rank=2),
    Column(name="memory"),
)
_Places = dict[tuple[int, str, str], set[int]]
"""By address, memory and name: the nodes that were given that pointer."""


def memory_link(graphs: Sequence[Titled], at: int) -> Link:
    """The way to the memory of a graph."""
    if graphs[at][1].memory is None:
        return "the record tells nothing of this graph's memory"
    return partial(memory_page, graphs, at)


def memory_page(graphs: Sequence[Titled], at: int) -> Page:
    """Segments, and in each what the nodes point at; Tab goes to the next graph's."""
    title, graph = graphs[at]
    return Page(
        title=f"memory of {title}",
        facts=tuple(_facts(graph)),
        columns=_COLUMNS,
        items=tuple(_items(graph)),
        beside=Beside(count=len(graphs), at=at, make=partial(memory_page, graphs)),
        empty="its nodes point nowhere that the record knows",
    )


def _facts(graph: GraphRecord) -> Iterator[str]:
    if graph.memory:
        yield f"{size(graph.memory.graph_bytes)} for this graph"
        yield f"{size(graph.memory.pool_bytes)} in the whole pool, which graphs share"


def _items(graph: GraphRecord) -> Iterator[Item]:
    left = _places(graph)
    for segment in graph.memory.segments if graph.memory else ():
        end = segment.address + segment.size
        inside = {key: left.pop(key) for key in list(left) if segment.address <= key[0] < end}
        yield _segment(segment, inside)
    if left:
        yield Item(
            key="elsewhere",
            values=("outside of all segments", len(set().union(*left.values())), None, None, None),
            note="Host memory, and device memory that the allocator does not have any more.",
            inside=partial(_inside, left),
        )


def _places(graph: GraphRecord) -> _Places:
    found: _Places = {}
    for node in graph.nodes:
        for argument in node.arguments:
            for pointer in argument.pointers:
                found.setdefault(_key(pointer), set()).add(node.index)
    return dict(sorted(found.items()))


def _key(pointer: Pointer) -> tuple[int, str, str]:
    return pointer.address, pointer.memory, pointer.name


def _segment(segment: Segment, inside: _Places) -> Item:
    nodes = len(set().union(*inside.values()))
    return Item(
        key=f"{segment.address:#x}",
        values=(f"{segment.address:#x}", nodes, segment.used, segment.size, f"{segment.pool} pool"),
        note=f"{count_of(len(inside), 'place')} in it, pointed at by {count_of(nodes, 'node')}",
        inside=partial(_inside, inside),
    )


def _inside(places: _Places) -> Iterator[Item]:
    for (address, memory, name), nodes in places.items():
        yield Item(
            key=f"{address:#x} {memory} {name}",
            values=(f"{address:#x} {name}", len(nodes), None, None, memory),
            note=f"{name or memory}, given to {_numbers(sorted(nodes))}",
            tone="bad" if memory == "freed" else "",
        )


def _numbers(nodes: Sequence[int]) -> str:
    return ", ".join(f"#{index}" for index in nodes)
