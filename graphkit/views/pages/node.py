"""The view of one node: what made it, how it is launched, its arguments, and its neighbours."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from graphkit.records import Argument, Edge, GraphRecord, Node, Pointer
from graphkit.views.node import facts_of
from graphkit.views.pages.page import Beside, Column, Item, Page

_COLUMNS = (
    Column(name="what"),
    Column(name="value", least=24),
    Column(name="memory", rank=1, most=9),
    Column(name="bytes", show="{:,}".format, is_number=True, rank=2),
)
_EDGES = {"programmatic": "programmatic (PDL): begins before the other one ends"}


def node_of_index(graph: GraphRecord, index: int) -> Page:
    """The page of the node that edges call by that index, which must be there."""
    return node_page(graph, next(at for at, n in enumerate(graph.nodes) if n.index == index))


def node_page(graph: GraphRecord, at: int) -> Page:
    """Everything about the node of that place; Tab goes to the next node of the graph."""
    node = graph.nodes[at]
    items = (*_facts(node), *_arguments(node), *_neighbours(graph, node))
    return Page(
        title=f"#{node.index} {node.short_name}",
        facts=tuple(fact for fact in (node.kind, node.module, node.source) if fact),
        columns=_COLUMNS,
        items=items,
        opened=frozenset(item.key for item in items if item.inside),
        beside=Beside(count=len(graph.nodes), at=at, make=partial(node_page, graph)),
    )


def _facts(node: Node) -> Iterator[Item]:
    for name, text in facts_of(node):
        yield Item(key=name, values=(name, text, None, None), note=text)


def _arguments(node: Node) -> Iterator[Item]:
    if node.arguments:
        items = tuple(_argument(at, argument) for at, argument in enumerate(node.arguments))
        yield _section("arguments", items)


def _argument(at: int, argument: Argument) -> Item:
    name, key = argument.name or f"{at}", f"argument {at}"
    pointers = argument.pointers
    if argument.kind == "pointer" and len(pointers) == 1:
        return _pointer(key, name, pointers[0], argument.size)
    return Item(
        key=key,
        values=(name, argument.text, argument.kind, argument.size),
        note=argument.text,
        inside=partial(_pointers, key, pointers) if pointers else None,
    )


def _pointers(key: str, pointers: Sequence[Pointer]) -> Iterator[Item]:
    for at, pointer in enumerate(pointers):
        yield _pointer(f"{key}.{at}", f"+{pointer.offset}", pointer, None)


def _pointer(key: str, name: str, pointer: Pointer, num_bytes: int | None) -> Item:
    where = f"{pointer.name} at {pointer.address:#x}" if pointer.name else f"{pointer.address:#x}"
    return Item(
        key=key,
        values=(name, where, pointer.memory, num_bytes),
        note=f"{pointer.memory} {where}",
        tone="bad" if pointer.memory == "freed" else "",
    )


def _neighbours(graph: GraphRecord, node: Node) -> Iterator[Item]:
    """Sections of other nodes, each of which can be gone to."""
    names = {each.index: each.short_name for each in graph.nodes}
    for section, others in _others(graph, node).items():
        items = tuple(
            _neighbour(f"{section} {index}", graph, index, names.get(index), edge)
            for index, edge in others
        )
        if items:
            yield _section(section, items)


def _others(graph: GraphRecord, node: Node) -> dict[str, list[tuple[int, Edge | None]]]:
    return {
        "waits for": [(edge.source, edge) for edge in graph.edges if edge.target == node.index],
        "waited for by": [(edge.target, edge) for edge in graph.edges if edge.source == node.index],
        "is in": [] if node.parent is None else [(node.parent, None)],
        "holds": [(each.index, None) for each in graph.nodes if each.parent == node.index],
    }


def _neighbour(
    key: str, graph: GraphRecord, index: int, name: str | None, edge: Edge | None
) -> Item:
    how = f", {_EDGES.get(edge.kind, edge.kind)}" if edge and edge.kind != "full" else ""
    text = f"{'not in the record' if name is None else name}{how}"
    return Item(
        key=key,
        values=(f"#{index}", text, None, None),
        note=f"#{index} {text}",
        links={} if name is None else {"open": partial(node_of_index, graph, index)},
    )


def _section(name: str, items: tuple[Item, ...]) -> Item:
    return Item(key=name, values=(name, f"{len(items):,}", None, None), inside=lambda: items)
