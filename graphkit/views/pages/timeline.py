"""Page of a replay as it ran: its nodes by start, and the gaps between them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from graphkit.records import GraphRecord, Node
from graphkit.views.formatting import us
from graphkit.views.pages.node import note_of, page_of_node
from graphkit.views.pages.page import Column, Page, Row, Siblings, count_column
from graphkit.views.selection import NamedGraph

_WIDTH = 20
_Span = tuple[float, float]
"""Start and end of a node as parts of the replay, 0 to 1."""


def timeline_page(graphs: Sequence[NamedGraph], index: int) -> Page:
    """Return the measured nodes of a graph in the order in which they started."""
    title, graph = graphs[index]
    return Page(
        title=f"timeline of {title}",
        facts=tuple(_facts(graph)),
        columns=_COLUMNS,
        rows=tuple(_rows(graph)),
        siblings=Siblings(count=len(graphs), index=index, make=partial(timeline_page, graphs)),
        empty="no replay of this graph was measured",
        nodes=graph.nodes,
    )


def _span(span: _Span) -> str:
    """Return a node's place in the replay: at least one cell in ``_WIDTH``."""
    begin = min(int(span[0] * _WIDTH), _WIDTH - 1)
    end = max(begin + 1, round(span[1] * _WIDTH))
    return " " * begin + "█" * (end - begin)


_COLUMNS = (
    Column(name="node", least=28, most=48),
    count_column("start us", 1, us),
    count_column("us", 2, us),
    count_column("gap us", 3, us),
    Column(name="time", show=_span, rank=4, most=_WIDTH),
    Column(name="module", rank=5, most=32),
)


def _facts(graph: GraphRecord) -> Iterator[tuple[str, str]]:
    if graph.timing:
        yield "busy", f"{us(graph.timing.busy_us)} us"
        yield "gaps", f"{us(graph.timing.gap_us)} us"


def _rows(graph: GraphRecord) -> Iterator[Row]:
    found = [node for node in graph.nodes if node.start_us is not None]
    found.sort(key=lambda node: (node.start_us or 0.0, node.index))
    whole = max((_end(node) for node in found), default=0.0) or 1.0
    reached = 0.0
    for node in found:
        start = node.start_us or 0.0
        gap = start - reached
        reached = max(reached, _end(node))
        yield Row(
            key=f"#{node.index}",
            values=(
                node.short_name, start, node.duration_us, gap if gap > 0 else None,
                (start / whole, _end(node) / whole), node.module or None,
            ),
            note=note_of(node),
            links={"open": partial(page_of_node, graph, node.index)},
            nodes=(node,),
        )  # fmt: skip


def _end(node: Node) -> float:
    return (node.start_us or 0.0) + (node.duration_us or 0.0)
