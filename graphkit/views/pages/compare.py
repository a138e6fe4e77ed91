"""The view of what changed from one graph to another, such as from one size to the next."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from graphkit.diff import diff_graphs
from graphkit.records import GraphDiff, GraphRecord, MetricChange, Node, NodeChange
from graphkit.views.figures import count_of, size, us
from graphkit.views.pages.node import node_of_index
from graphkit.views.pages.page import Beside, Column, Item, Link, Page
from graphkit.views.selection import Titled

_COLUMNS = (
    Column(name="what", least=24),
    Column(name="before", most=24),
    Column(name="after", most=24),
    Column(name="module", rank=1, most=36),
)


def compare_link(graphs: Sequence[Titled], at: int) -> Link:
    """The way to what changed to a graph since the one before it; the first takes the one after."""
    if len(graphs) < 2:
        return "there is no other graph to compare it with"
    return partial(compare_page, graphs, at, max(at - 1, 0))


def compare_page(graphs: Sequence[Titled], at: int, place: int) -> Page:
    """What changed to a graph from one of the others; Tab takes the next of those.

    Args:
        graphs: All of them.
        at: The graph.
        place: Which of the others, itself left out.
    """
    others = [graph for other, graph in enumerate(graphs) if other != at]
    (title_before, before), (title, after) = others[place], graphs[at]
    items = tuple(_sections(diff_graphs(before, after), before, after))
    return Page(
        title=f"from {title_before} to {title}",
        facts=(
            f"{count_of(len(before.nodes), 'node')} before",
            f"{count_of(len(after.nodes), 'node')} after",
        ),
        columns=_COLUMNS,
        items=items,
        opened=frozenset({"in words", "figures"}),
        beside=Beside(count=len(others), at=place, make=partial(compare_page, graphs, at)),
    )


def _sections(diff: GraphDiff, before: GraphRecord, after: GraphRecord) -> Iterator[Item]:
    yield _section("in words", "", map(_word, diff.words))
    yield _section("figures", "", map(_figure, diff.figures))
    yield _section("changed", "", (_change(change, after) for change in diff.changed))
    yield _section("added", "good", (_node(node, after, is_new=True) for node in diff.added))
    yield _section("removed", "bad", (_node(node, before, is_new=False) for node in diff.removed))


def _section(name: str, tone: str, items: Iterable[Item]) -> Item:
    made = tuple(items)
    title = f"{name}: {len(made):,}"
    return Item(
        key=name,
        values=(title, None, None, None),
        tone=tone if made else "faint",
        inside=(lambda: made) if made else None,
    )


def _word(word: str) -> Item:
    return Item(key=word, values=(word, None, None, None), note=word)


def _figure(figure: MetricChange) -> Item:
    show = size if figure.name.endswith("_bytes") else us
    before, after = (None if it is None else show(it) for it in (figure.before, figure.after))
    return Item(key=figure.name, values=(figure.name, before, after, None))


def _change(change: NodeChange, after: GraphRecord) -> Item:
    return Item(
        key=f"changed {change.after}",
        values=(change.name, f"#{change.before}", f"#{change.after}", change.module or None),
        note="; ".join(f"{each.field}: {each.before} -> {each.after}" for each in change.changes),
        inside=partial(_fields, change),
        links={"open": partial(node_of_index, after, change.after)},
    )


def _fields(change: NodeChange) -> Iterator[Item]:
    for each in change.changes:
        yield Item(
            key=f"changed {change.after} {each.field}",
            values=(each.field, each.before, each.after, None),
            note=f"{each.field}: {each.before} -> {each.after}",
        )


def _node(node: Node, graph: GraphRecord, *, is_new: bool) -> Item:
    place = f"#{node.index}"
    before, after = (None, place) if is_new else (place, None)
    return Item(
        key=f"{'added' if is_new else 'removed'} {node.index}",
        values=(node.short_name, before, after, node.module or None),
        note=f"{place} {node.name}",
        links={"open": partial(node_of_index, graph, node.index)},
    )
