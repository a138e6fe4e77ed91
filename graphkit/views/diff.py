"""A DiffRecord as people see it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from graphkit.diff.sentences import NOTHING_CHANGED
from graphkit.records import DiffRecord, FieldChange, GraphDiff, MetricChange, Node, NodeChange
from graphkit.views.figures import facts, listed, plain, table

_SHOWN = 12
_LONGEST = 80


def diff_view(record: DiffRecord) -> RenderableType:
    """Where they were made, figures before and after, and per graph what became of its nodes."""
    return Group(*_parts(record))


def _parts(record: DiffRecord) -> Iterator[RenderableType]:
    yield facts([(name, plain(text)) for name, text in _header(record)])
    figures = [*_figures(record)]
    if figures:
        yield ""
        yield _figures_table(figures)
    for graph in record.graphs:
        if not graph.is_same:
            yield ""
            yield from _graph(graph)
    same = [_name(graph) for graph in record.graphs if graph.is_same]
    if same:
        yield ""
        yield Text(plain(f"{NOTHING_CHANGED} inside of {listed(same)}"), style="green")


def _header(record: DiffRecord) -> Iterator[tuple[str, str]]:
    yield "before", record.before
    yield "after", record.after
    for change in record.environment:
        yield change.field, f"{change.before or 'none'} -> {change.after or 'none'}"
    if record.only_before:
        yield "only before", listed(record.only_before)
    if record.only_after:
        yield "only after", listed(record.only_after)


def _figures(record: DiffRecord) -> Iterator[tuple[str, MetricChange]]:
    for size in record.sizes:
        yield from ((f"{size.mode} {size.batch_size}", figure) for figure in size.figures)
    for graph in record.graphs:
        yield from ((_name(graph), figure) for figure in graph.figures)


def _figures_table(figures: Sequence[tuple[str, MetricChange]]) -> Table:
    made = table(("", "figure"), ("before", "after", "change"), "figures")
    shown = ""
    for where, figure in figures:
        made.add_row(
            Text(plain(where if where != shown else "")),
            Text(plain(figure.name.replace("_", " "))),
            _number(figure.before),
            _number(figure.after),
            _change(figure),
        )
        shown = where
    return made


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.2f}"


def _change(figure: MetricChange) -> str:
    if not figure.before or figure.after is None:
        return ""
    return f"{figure.after / figure.before - 1:+.1%}"


def _graph(graph: GraphDiff) -> Iterator[RenderableType]:
    count = f"{graph.num_nodes_before:,} -> {graph.num_nodes_after:,} nodes"
    yield Text(plain(f"{_name(graph)}: {count}"), style="bold")
    yield from (_indented(Text(plain(sentence))) for sentence in graph.words)
    nodes = [*_nodes("+", graph.added), *_nodes("-", graph.removed), *_changes(graph.changed)]
    yield from map(_indented, nodes[:_SHOWN])
    if len(nodes) > _SHOWN:
        yield _indented(Text(f"and {len(nodes) - _SHOWN:,} nodes more; --json lists all"))


def _indented(line: Text) -> Padding:
    return Padding(line, (0, 0, 0, 2))


def _nodes(sign: str, nodes: Sequence[Node]) -> Iterator[Text]:
    style = "green" if sign == "+" else "red"
    for node in nodes:
        where = f" in {node.module}" if node.module else ""
        yield Text(plain(f"{sign} #{node.index} {node.short_name}{where}"), style=style)


def _changes(changed: Sequence[NodeChange]) -> Iterator[Text]:
    for node in changed:
        where = f" in {node.module}" if node.module else ""
        number = (
            f"#{node.before} -> #{node.after}" if node.before != node.after else f"#{node.after}"
        )
        said = "; ".join(map(_said, node.changes))
        yield Text(plain(f"~ {number} {node.name}{where}: {said}"), style="yellow")


def _said(change: FieldChange) -> str:
    """The change; of one that is too long to read its field alone."""
    before, after = change.before or "none", change.after or "none"
    is_long = len(before) + len(after) > _LONGEST
    return change.field if is_long else f"{change.field}: {before} -> {after}"


def _name(graph: GraphDiff) -> str:
    return graph.after if graph.before == graph.after else f"{graph.before} -> {graph.after}"
