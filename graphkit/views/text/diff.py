"""A DiffRecord as text: environments, figures, and the changed nodes of each graph."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from graphkit.records import (
    DiffRecord,
    FieldChange,
    GraphDiff,
    MetricChange,
    Node,
    NodeChange,
    figure_heading,
    listed,
)
from graphkit.views.diff.figures import relative_change
from graphkit.views.diff.sentences import NOTHING_CHANGED
from graphkit.views.formatting import facts_table, number, plain, text_table

_MAX_NODES = 12
_MAX_LENGTH = 80


def diff_view(record: DiffRecord) -> RenderableType:
    """Return what differs: environments, figures before and after, and nodes by graph."""
    return Group(*_parts(record))


def _parts(record: DiffRecord) -> Iterator[RenderableType]:
    yield facts_table(_header(record))
    figures = [*_figures(record)]
    if figures:
        yield ""
        yield _figures_table(figures)
    changed = [graph for graph in record.graphs if not graph.is_same]
    shared = _shared((_name(graph), graph.words) for graph in changed)
    yield from _shared_sentences(shared, len(changed))
    for graph in changed:
        if any(_changed_nodes(graph)) or not shared.keys() >= {*graph.words}:
            yield ""
            yield from _graph(graph, shared)
    yield from _arguments(changed)
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
    table = text_table(("", "figure"), ("before", "after", "change"), "figures")
    previous = ""
    for name, figure in figures:
        table.add_row(
            Text(plain(name if name != previous else "")),
            Text(plain(figure_heading(figure.name))),
            _number(figure.before),
            _number(figure.after),
            _ratio(figure),
        )
        previous = name
    return table


def _number(value: float | None) -> str:
    is_count = value is not None and float(value).is_integer()
    return number(value, ",.0f" if is_count else ",.2f")


def _ratio(figure: MetricChange) -> str:
    change = relative_change(figure)
    return "" if change is None else f"{change:+.1%}"


def _shared(graphs: Iterable[tuple[str, Sequence[str]]]) -> dict[str, list[str]]:
    """Return the sentences of several graphs, and the names of these.

    Args:
        graphs: Name and sentences of each.
    """
    names: dict[str, list[str]] = {}
    for name, sentences in graphs:
        for sentence in sentences:
            names.setdefault(sentence, []).append(name)
    return {sentence: those for sentence, those in names.items() if len(those) > 1}


def _shared_sentences(
    shared: Mapping[str, Sequence[str]], num_graphs: int, what: str = ""
) -> Iterator[RenderableType]:
    """Yield the sentences of several graphs once, by these graphs."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for sentence, those in shared.items():
        groups.setdefault(tuple(those), []).append(sentence)
    for names, sentences in groups.items():
        yield ""
        where = f"all {num_graphs} graphs" if len(names) == num_graphs else listed(names)
        yield Text(plain(f"{what}in {where}"), style="bold")
        yield from (_indented(Text(plain(sentence))) for sentence in sentences)


def _arguments(graphs: Sequence[GraphDiff]) -> Iterator[RenderableType]:
    """Yield the changes of arguments last: most of them follow from another size or address."""
    shared = _shared((_name(graph), graph.details) for graph in graphs)
    yield from _shared_sentences(shared, len(graphs), "arguments ")
    for graph in graphs:
        own = [sentence for sentence in graph.details if sentence not in shared]
        if own:
            yield ""
            yield Text(plain(f"arguments in {_name(graph)}"), style="bold")
            yield from (_indented(Text(plain(sentence))) for sentence in own)


def _graph(graph: GraphDiff, elsewhere: Container[str]) -> Iterator[RenderableType]:
    """Yield the nodes that changed, and the sentences that are not shown elsewhere."""
    count = f"{graph.num_nodes_before:,} -> {graph.num_nodes_after:,} nodes"
    yield Text(plain(f"{_name(graph)}: {count}"), style="bold")
    own = (sentence for sentence in graph.words if sentence not in elsewhere)
    yield from (_indented(Text(plain(sentence))) for sentence in own)
    nodes = list(_changed_nodes(graph))
    yield from map(_indented, nodes[:_MAX_NODES])
    if len(nodes) > _MAX_NODES:
        yield _indented(Text(f"and {len(nodes) - _MAX_NODES:,} more nodes; --json lists all"))


def _changed_nodes(graph: GraphDiff) -> Iterator[Text]:
    yield from _nodes("+", graph.added)
    yield from _nodes("-", graph.removed)
    yield from _changes(graph.changed)


def _indented(line: Text) -> Padding:
    return Padding(line, (0, 0, 0, 2))


def _nodes(sign: str, nodes: Sequence[Node]) -> Iterator[Text]:
    style = "green" if sign == "+" else "red"
    for node in nodes:
        module = f" in {node.module}" if node.module else ""
        yield Text(plain(f"{sign} #{node.index} {node.short_name}{module}"), style=style)


def _changes(changed: Sequence[NodeChange]) -> Iterator[Text]:
    """Yield the nodes that changed; last the ones of which only arguments changed."""
    for node in sorted(changed, key=_changes_only_arguments):
        module = f" in {node.module}" if node.module else ""
        is_moved = node.before != node.after
        index = f"#{node.before} -> #{node.after}" if is_moved else f"#{node.after}"
        fields = "; ".join(map(_field, node.changes))
        yield Text(plain(f"~ {index} {node.name}{module}: {fields}"), style="yellow")


def _changes_only_arguments(node: NodeChange) -> bool:
    return all(change.field.startswith("argument ") for change in node.changes)


def _field(change: FieldChange) -> str:
    """Return the change, or only its field if the values are too long to read."""
    before, after = change.before or "none", change.after or "none"
    is_long = len(before) + len(after) > _MAX_LENGTH
    return change.field if is_long else f"{change.field}: {before} -> {after}"


def _name(graph: GraphDiff) -> str:
    return graph.after if graph.before == graph.after else f"{graph.before} -> {graph.after}"
