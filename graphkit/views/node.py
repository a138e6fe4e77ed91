"""Everything about one node as text."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from graphkit.records import Argument, Node, Pointer
from graphkit.views.figures import extent, facts, plain, size, table, us


def node_view(node: Node) -> RenderableType:
    """What made it, how it is launched, what it costs, and every argument with what it means."""
    return Group(
        Text(f"#{node.index} {plain(node.short_name)}", style="bold"),
        facts([(name, plain(text)) for name, text in _facts(node)]),
        *([_arguments(node)] if node.arguments else []),
    )


def facts_of(node: Node) -> list[tuple[str, str]]:
    """What made it, what it costs and how it is launched, as far as it has that: name and text."""
    return [(name, text) for name, text in (*_origin(node), *_launch(node)) if text]


def _facts(node: Node) -> Iterator[tuple[str, str]]:
    yield from facts_of(node)
    if node.parent is not None:
        yield "inside of", f"#{node.parent}"


def _origin(node: Node) -> Iterator[tuple[str, str]]:
    yield "name", node.name
    yield "kind", node.kind
    yield "module", node.module
    yield "op", node.op
    yield "source", node.source
    yield "scope", node.scope


def _launch(node: Node) -> Iterator[tuple[str, str]]:
    yield "time", "" if node.duration_us is None else f"{us(node.duration_us)} us"
    yield "starts at", "" if node.start_us is None else f"{us(node.start_us)} us"
    yield "grid", extent(node.grid)
    yield "block", extent(node.block)
    yield "cluster", extent(node.cluster)
    yield "shared memory", size(node.shared_memory_bytes) if node.shared_memory_bytes else ""
    yield "registers", str(node.registers) if node.registers else ""
    yield from node.attributes.items()


def _arguments(node: Node) -> Table:
    made = table(("argument",), ("at", "bytes"))
    made.add_column("kind")
    made.add_column("value", overflow="fold")
    for place, argument in enumerate(node.arguments):
        made.add_row(
            Text(plain(argument.name) or str(place)),
            str(argument.offset),
            str(argument.size),
            Text(plain(argument.kind)),
            Text("\n".join(_value(argument))),
        )
    return made


def _value(argument: Argument) -> Iterator[str]:
    if argument.kind != "pointer" or not argument.pointers:
        yield plain(argument.text)
    yield from (plain(_leads_to(pointer, argument)) for pointer in argument.pointers)


def _leads_to(pointer: Pointer, argument: Argument) -> str:
    where = f"+{pointer.offset}: " if len(argument.pointers) > 1 or pointer.offset else ""
    return f"{where}{pointer.address:#x} {pointer.memory} {pointer.name}".rstrip()
