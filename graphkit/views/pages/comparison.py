"""Pages of what changed: between two graphs, such as two sizes of a mode, and between records."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from graphkit.records import (
    DiffRecord,
    FieldChange,
    GraphDiff,
    GraphRecord,
    MetricChange,
    Node,
    NodeChange,
    figure_heading,
    listed,
)
from graphkit.views.diff import NOTHING_CHANGED, diff_graphs, relative_change
from graphkit.views.formatting import number, size
from graphkit.views.pages.node import page_by_index
from graphkit.views.pages.page_model import Column, GraphGroup, Link, Page, Row, Siblings, section

_COLUMNS = (
    Column(name="change", least=24),
    Column(name="before", most=24),
    Column(name="after", most=24),
    Column(name="module", rank=1, most=36),
)
_NODE_SECTIONS = ("changed", "added", "removed")
_MOST_NODES = 12
"""Most nodes of such a section that the text of a difference lists."""
_Graphs = tuple[GraphRecord, GraphRecord]


def comparison_link(group: GraphGroup, index: int) -> Link:
    """Return the link to a graph's comparison with the one before it, for the first the next."""
    if len(group.graphs) < 2:
        return "there is no other graph to compare it with"
    return partial(comparison_page, group, index, max(index - 1, 0))


def comparison_page(group: GraphGroup, index: int, other: int) -> Page:
    """Return what changed to a graph from another one, the graph ``other`` of the others."""
    others = [graph for at, graph in enumerate(group.graphs) if at != index]
    (title_before, before), (title, after) = others[other], group.graphs[index]
    diff = diff_graphs(before, after)
    return Page(
        title=f"from {title_before} to {title}",
        facts=(("nodes", f"{len(before.nodes):,} before, {len(after.nodes):,} after"),),
        columns=_COLUMNS,
        rows=(
            *map(_sentence, diff.words),
            *map(_metric, diff.figures),
            *_node_sections(diff, (before, after)),
            _section("arguments", map(_sentence, diff.details)),
        ),
        links={**group.links(index), "compare": "tab compares with another graph"},
        siblings=Siblings(
            count=len(others), index=other, make=partial(comparison_page, group, index)
        ),
    )


def diff_page(record: DiffRecord) -> Page:
    """Return what changed between two records, for text: sentences of several graphs, then graphs.

    Changes of arguments are last: most of them follow from another size or address.
    """
    changed = {_name(graph): graph for graph in record.graphs if not graph.is_same}
    same = [_name(graph) for graph in record.graphs if graph.is_same]
    sections = defaultdict[str, list[Row]](list)
    for where, row in _said({name: graph.words for name, graph in changed.items()}):
        sections[where].append(row)
    sizes = [(f"{size.mode} {size.batch_size}", size.figures) for size in record.sizes]
    for name, figures in [*sizes, *((_name(graph), graph.figures) for graph in record.graphs)]:
        known = {row.key for row in sections[name]}  # a size and its graph have the same pool
        sections[name] += [_metric(figure) for figure in figures if figure.name not in known]
    for name, graph in changed.items():
        nodes = (row for row in _node_sections(graph) if row.make_children)
        sections[name] += [replace(row, key=f"{name} {row.key}") for row in nodes]
    for where, row in _said({name: graph.details for name, graph in changed.items()}):
        sections[f"arguments of {where}"].append(row)
    rows = [
        section(name, (_title(name, changed.get(name)), None, None, None), inside)
        for name, inside in sections.items()
        if inside
    ]
    opened = frozenset(key for row in rows for key in _short(row))
    notes = [f"{NOTHING_CHANGED} inside of {listed(same)}"] if same else []
    if any(inner.key not in opened for row in rows for inner in row.children if inner.children):
        notes.append(f"More than {_MOST_NODES} nodes are counted; --json lists them.")
    return Page(
        title="what changed",
        facts=tuple(_facts(record)),
        columns=_COLUMNS,
        rows=tuple(rows),
        notes=tuple(notes),
        opened=opened,
        empty="no changed figure" + ("" if same else ", and no graph that both records have"),
    )


def _title(name: str, graph: GraphDiff | None) -> str:
    if graph is None:
        return name
    return f"{name}: {graph.num_nodes_before:,} -> {graph.num_nodes_after:,} nodes"


def _short(row: Row) -> Iterator[str]:
    """Yield the key of a row and those inside of it, unless they are too many nodes to read."""
    if not row.key.endswith(_NODE_SECTIONS) or len(row.children) <= _MOST_NODES:
        yield row.key
        for child in row.children:
            yield from _short(child)


def _facts(record: DiffRecord) -> Iterator[tuple[str, str]]:
    yield "before", record.before
    yield "after", record.after
    for change in record.environment:
        yield change.field, f"{change.before or 'none'} -> {change.after or 'none'}"
    if record.only_before:
        yield "only before", listed(record.only_before)
    if record.only_after:
        yield "only after", listed(record.only_after)


def _name(graph: GraphDiff) -> str:
    return graph.after if graph.before == graph.after else f"{graph.before} -> {graph.after}"


def _said(sentences: Mapping[str, Sequence[str]]) -> Iterator[tuple[str, Row]]:
    """Yield sentences as rows with the graphs that they hold for, those of several graphs first."""
    graphs = defaultdict[str, list[str]](list)
    for name, said in sentences.items():
        for sentence in said:
            graphs[sentence].append(name)
    for sentence, names in sorted(graphs.items(), key=lambda pair: len(pair[1]) == 1):
        is_all = 1 < len(names) == len(sentences)
        yield f"all {len(names)} graphs" if is_all else listed(names), _sentence(sentence)


def _node_sections(diff: GraphDiff, graphs: _Graphs | None = None) -> Iterator[Row]:
    """Yield the changed, added and removed nodes; with graphs, they lead to the pages of nodes."""
    before, after = graphs or (None, None)
    yield _section("changed", (_change(change, after) for change in diff.changed))
    yield _section("added", (_node(node, after, is_new=True) for node in diff.added), "good")
    yield _section("removed", (_node(node, before, is_new=False) for node in diff.removed), "bad")


def _section(name: str, rows: Iterable[Row], tone: str = "") -> Row:
    made = tuple(rows)
    tone = tone if made else "faint"
    return section(name, (f"{name}: {len(made):,}", None, None, None), made, tone=tone)


def _sentence(text: str) -> Row:
    return Row(key=text, values=(text, None, None, None), note=text)


def _metric(change: MetricChange) -> Row:
    before, after = (_figure(change.name, value) for value in (change.before, change.after))
    part = relative_change(change)
    after += "" if part is None or math.isinf(part) else f" ({part:+.1%})"
    return Row(key=change.name, values=(figure_heading(change.name), before, after, None))


def _figure(name: str, value: float | None) -> str:
    if value is not None and name.endswith("_bytes"):
        return size(value)
    is_count = value is not None and float(value).is_integer()
    return number(value, ",.0f" if is_count else ",.2f")


def _change(change: NodeChange, after: GraphRecord | None) -> Row:
    return Row(
        key=f"changed {change.after}",
        values=(change.name, f"#{change.before}", f"#{change.after}", change.module or None),
        note="; ".join(map(_field_change, change.changes)),
        make_children=partial(_fields, change),
        links=_open(after, change.after),
    )


def _fields(change: NodeChange) -> Iterator[Row]:
    for field in change.changes:
        yield Row(
            key=f"changed {change.after} {field.field}",
            values=(field.field, field.before, field.after, None),
            note=_field_change(field),
        )


def _field_change(field: FieldChange) -> str:
    return f"{field.field}: {field.before} -> {field.after}"


def _node(node: Node, graph: GraphRecord | None, *, is_new: bool) -> Row:
    index = f"#{node.index}"
    before, after = (None, index) if is_new else (index, None)
    return Row(
        key=f"{'added' if is_new else 'removed'} {node.index}",
        values=(node.short_name, before, after, node.module or None),
        note=f"{index} {node.name}",
        links=_open(graph, node.index),
    )


def _open(graph: GraphRecord | None, index: int) -> dict[str, Link]:
    return {} if graph is None else {"open": partial(page_by_index, graph, index)}
