"""Page of what changed between two graphs, such as two sizes of a mode."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from graphkit.records import (
    FieldChange,
    GraphDiff,
    GraphRecord,
    MetricChange,
    Node,
    NodeChange,
    figure_heading,
)
from graphkit.views.diff import diff_graphs
from graphkit.views.formatting import size, us
from graphkit.views.pages.node import page_by_index
from graphkit.views.pages.page_model import Column, GraphGroup, Link, Page, Row, Siblings, section

_COLUMNS = (
    Column(name="change", least=24),
    Column(name="before", most=24),
    Column(name="after", most=24),
    Column(name="module", rank=1, most=36),
)


def comparison_link(group: GraphGroup, index: int) -> Link:
    """Return the link to a graph's comparison with the one before it, for the first the next."""
    if len(group.graphs) < 2:
        return "there is no other graph to compare it with"
    return partial(comparison_page, group, index, max(index - 1, 0))


def comparison_page(group: GraphGroup, index: int, other: int) -> Page:
    """Return what changed to a graph from one of the other graphs.

    Args:
        group: The graphs.
        index: Index of the graph.
        other: Index among the other graphs.
    """
    others = [graph for at, graph in enumerate(group.graphs) if at != index]
    (title_before, before), (title, after) = others[other], group.graphs[index]
    return Page(
        title=f"from {title_before} to {title}",
        facts=(("nodes", f"{len(before.nodes):,} before, {len(after.nodes):,} after"),),
        columns=_COLUMNS,
        rows=tuple(_sections(diff_graphs(before, after), before, after)),
        opened=frozenset({"summary", "figures"}),
        links={**group.links(index), "compare": "tab compares with another graph"},
        siblings=Siblings(
            count=len(others), index=other, make=partial(comparison_page, group, index)
        ),
    )


def _sections(diff: GraphDiff, before: GraphRecord, after: GraphRecord) -> Iterator[Row]:
    sections = {
        "summary": ("", [_sentence(sentence) for sentence in diff.words]),
        "figures": ("", [_metric(change) for change in diff.figures]),
        "arguments": ("", [_sentence(sentence) for sentence in diff.details]),
        "changed": ("", [_change(change, after) for change in diff.changed]),
        "added": ("good", [_node(node, after, is_new=True) for node in diff.added]),
        "removed": ("bad", [_node(node, before, is_new=False) for node in diff.removed]),
    }
    for name, (tone, rows) in sections.items():
        values = (f"{name}: {len(rows):,}", None, None, None)
        yield section(name, values, rows, tone=tone if rows else "faint")


def _sentence(text: str) -> Row:
    return Row(key=text, values=(text, None, None, None), note=text)


def _metric(change: MetricChange) -> Row:
    show = size if change.name.endswith("_bytes") else us
    values = (change.before, change.after)
    texts = (None if value is None else show(value) for value in values)
    return Row(key=change.name, values=(figure_heading(change.name), *texts, None))


def _change(change: NodeChange, after: GraphRecord) -> Row:
    return Row(
        key=f"changed {change.after}",
        values=(change.name, f"#{change.before}", f"#{change.after}", change.module or None),
        note="; ".join(map(_field_change, change.changes)),
        make_children=partial(_fields, change),
        links={"open": partial(page_by_index, after, change.after)},
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


def _node(node: Node, graph: GraphRecord, *, is_new: bool) -> Row:
    index = f"#{node.index}"
    before, after = (None, index) if is_new else (index, None)
    return Row(
        key=f"{'added' if is_new else 'removed'} {node.index}",
        values=(node.short_name, before, after, node.module or None),
        note=f"{index} {node.name}",
        links={"open": partial(page_by_index, graph, node.index)},
    )
