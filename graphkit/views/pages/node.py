"""Page of one node: its origin, launch, arguments, and the nodes around it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from graphkit.records import Argument, GraphRecord, Node, Pointer, extent
from graphkit.views.formatting import size, us
from graphkit.views.pages.page_model import Column, Page, Row, Siblings, count_column, section
from graphkit.views.source_code import source_code

NODE_COLUMNS = (
    Column(name="fact"),
    Column(name="value", least=24),
    Column(name="kind", rank=1, most=9),
    count_column("offset", 3),
    count_column("bytes", 2),
)
_NONE = (None, None, None)
_HEADER = ("kind", "module", "source", "time")
"""Facts that the head of the page repeats."""
_EDGES = {"programmatic": "programmatic (PDL): the later node starts before the earlier one ends"}


def node_row(graph: GraphRecord, node: Node, values: tuple[Any, ...], part: str = "") -> Row:
    """Return the row of a node on a page of its graph, which leads to the page of the node."""
    op = node.op if node.op != node.name else ""
    note = (f"#{node.index}", node.module, op, node.source, node.name)  # the longest one last
    return Row(
        key=f"#{node.index}",
        values=values,
        note=" · ".join(filter(None, note)),
        links={"open": partial(page_by_index, graph, node.index)},
        nodes=(node,),
        part=part,
    )


def page_by_index(graph: GraphRecord, index: int) -> Page:
    """Return the page of the first node with that ``Node.index``, which must exist."""
    return node_page(graph, next(at for at, n in enumerate(graph.nodes) if n.index == index))


def node_page(graph: GraphRecord, at: int) -> Page:
    """Return everything about ``graph.nodes[at]``."""
    node = graph.nodes[at]
    rows = (
        *(Row(key=n, values=(n, text, *_NONE), note=text) for n, text in node_facts(node)),
        *_source_rows(node),
        *([_section("arguments", [*argument_rows(node)])] if node.arguments else []),
        *_neighbour_rows(graph, node),
    )
    return Page(
        title=f"#{node.index} {node.short_name}",
        crumb=" > ".join(filter(None, (node.module, f"#{node.index} {node.short_name}"))),
        facts=tuple(fact for fact in node_facts(node) if fact[0] in _HEADER),
        columns=NODE_COLUMNS,
        rows=rows,
        opened=frozenset(row.key for row in rows if row.make_children),
        siblings=Siblings(count=len(graph.nodes), index=at, make=partial(node_page, graph)),
    )


def node_facts(node: Node) -> Iterator[tuple[str, str]]:
    """Yield name and text of what is known of a node's origin and of its launch."""
    yield from ((name, text) for name, text in _facts(node) if text)


def _facts(node: Node) -> Iterator[tuple[str, str]]:
    yield "name", node.name
    yield "kind", node.kind
    yield "module", node.module
    yield "op", node.op
    yield "source", node.source
    yield "scope", node.scope
    yield "time", "" if node.duration_us is None else f"{us(node.duration_us)} us"
    yield "starts at", "" if node.start_us is None else f"{us(node.start_us)} us"
    yield "grid", extent(node.grid)
    yield "block", extent(node.block)
    yield "cluster", extent(node.cluster)
    yield "shared memory", size(node.shared_memory_bytes) if node.shared_memory_bytes else ""
    yield "registers", str(node.registers) if node.registers else ""
    yield from node.attributes.items()


def _source_rows(node: Node) -> Iterator[Row]:
    """Yield the lines around the one that made the node, if the file is on this machine."""
    if not node.source:
        return
    code = source_code(node.source)
    rows = [
        Row(
            key=f"line {number}",
            values=(f"{'>' if number == code.line else ' '} {number}", text.expandtabs(), *_NONE),
            note=f"{code.path}:{number}",
            tone="" if number == code.line else "faint",
        )
        for number, text in code.lines
    ]
    title, text = "source code", code.path or code.problem
    note = text if rows else f"{text}. Start graphkit in the folder of the program to see lines."
    yield section(title, (title, text, *_NONE), rows, note=note)


def argument_rows(node: Node) -> Iterator[Row]:
    """Yield the arguments of a node, and inside of each structure its pointers."""
    return (_argument(at, argument) for at, argument in enumerate(node.arguments))


def _argument(at: int, argument: Argument) -> Row:
    name, key, pointers = argument.name or f"{at}", f"argument {at}", argument.pointers
    if argument.kind == "pointer" and len(pointers) == 1:
        return _pointer(key, name, pointers[0], argument.offset, argument.size)
    return Row(
        key=key,
        values=(name, argument.text, argument.kind, argument.offset, argument.size),
        note=argument.text,
        make_children=partial(_pointers, key, pointers) if pointers else None,
    )


def _pointers(key: str, pointers: Sequence[Pointer]) -> Iterator[Row]:
    for at, pointer in enumerate(pointers):
        yield _pointer(f"{key}.{at}", f"+{pointer.offset}", pointer, None, None)


def _pointer(
    key: str, name: str, pointer: Pointer, offset: int | None, num_bytes: int | None
) -> Row:
    target = f"{pointer.name} at {pointer.address:#x}" if pointer.name else f"{pointer.address:#x}"
    return Row(
        key=key,
        values=(name, target, pointer.memory, offset, num_bytes),
        note=f"{pointer.memory} {target}",
        tone="bad" if pointer.memory == "freed" else "",
    )


def _neighbour_rows(graph: GraphRecord, node: Node) -> Iterator[Row]:
    names = {other.index: other.short_name for other in graph.nodes}
    edges = graph.edges
    neighbours = {
        "waits for": [(edge.source, edge.kind) for edge in edges if edge.target == node.index],
        "waited for by": [(edge.target, edge.kind) for edge in edges if edge.source == node.index],
        "is in": [] if node.parent is None else [(node.parent, "full")],
        "holds": [(other.index, "full") for other in graph.nodes if other.parent == node.index],
    }
    for title, others in neighbours.items():
        if others:
            rows = [_neighbour(title, graph, at, names.get(at), kind) for at, kind in others]
            yield _section(title, rows)


def _neighbour(title: str, graph: GraphRecord, index: int, name: str | None, kind: str) -> Row:
    how = "" if kind == "full" else f", {_EDGES.get(kind, kind)}"
    text = f"{'not in the record' if name is None else name}{how}"
    return Row(
        key=f"{title} {index}",
        values=(f"#{index}", text, None, None, None),
        note=f"#{index} {text}",
        links={} if name is None else {"open": partial(page_by_index, graph, index)},
    )


def _section(name: str, rows: Sequence[Row]) -> Row:
    return section(name, (name, f"{len(rows):,}", None, None, None), rows)
