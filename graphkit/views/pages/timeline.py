"""Page of a replay as it ran: its nodes by start, the gaps between them, and what overlaps."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from graphkit.records import GraphRecord, Node
from graphkit.views.formatting import PROFILED, time_facts, us, within_one
from graphkit.views.module_tree import node_parts, source_cell
from graphkit.views.pages.node import node_row
from graphkit.views.pages.page_model import Column, GraphGroup, Page, Row, count_column

_WIDTH = 20
"""Cells of a node's place in the replay, as text."""


class Span(NamedTuple):
    """Times of a node, in us, and of the gap before it, if there is one."""

    begin: float
    end: float
    gap: float | None
    branch: int


def timeline_page(group: GraphGroup, index: int) -> Page:
    """Return the measured nodes of a graph in the order in which they started."""
    graph = group.graphs[index][1]
    spans = replay_spans(graph)
    has_branches = any(span.branch for _, span in spans)
    return group.page(
        index,
        timeline_page,
        key="time",
        crumb="timeline",
        facts=tuple(_facts(graph, spans)),
        columns=_columns(spans, has_branches=has_branches),
        rows=tuple(_rows(graph, spans, has_branches=has_branches)),
        notes=(PROFILED,) if spans else (),
        empty="no replay of this graph was measured",
    )


def _columns(spans: Sequence[tuple[Node, Span]], *, has_branches: bool) -> tuple[Column, ...]:
    whole = max((span.end for _, span in spans), default=0.0) or 1.0

    def picture(span: Span, width: int = _WIDTH) -> str:
        """Return a node's place in the replay, after the gap before it; at least one cell."""

        def cell(time: float) -> int:
            return min(int(within_one(time / whole) * width), width - 1)

        gap, first = cell(span.begin - (span.gap or 0.0)), cell(span.begin)
        length = max(math.ceil(within_one(span.end / whole) * width) - first, 1)
        return " " * gap + "░" * (first - gap) + "▓█"[not span.branch] * length

    return (
        Column(name="node", most=40, narrow=24),
        count_column("start us", 5, us),
        count_column("us", 2, us),
        count_column("gap us", 3, us),
        *([count_column("branch", 6)] if has_branches else []),
        Column(name="time", show=picture, rank=1, least=18, draw=picture, tint="part"),
        Column(name="source", rank=4, most=40),
        Column(name="part", rank=7, most=8, tint="part"),
        Column(name="module", rank=8, most=32),
    )


def _facts(graph: GraphRecord, spans: Sequence[tuple[Node, Span]]) -> Iterator[tuple[str, str]]:
    yield from time_facts(graph)
    longest = max(graph.timeline.gaps, key=lambda gap: gap.us, default=None)
    if longest:
        yield "longest gap", f"{us(longest.us)} us before #{longest.node}"
    branches = max((span.branch for _, span in spans), default=0) + 1
    if branches > 1:
        yield "branches", f"{branches}, side by side"


def replay_spans(graph: GraphRecord) -> list[tuple[Node, Span]]:
    """Return the measured nodes in the order in which they started, and when each one ran."""
    pairs = zip(graph.nodes, node_branches(graph), strict=True)
    measured = [(node, branch or 0) for node, branch in pairs if node.start_us is not None]
    measured.sort(key=lambda pair: (pair[0].start_us or 0.0, pair[0].index))
    gaps = {gap.node: gap.us for gap in graph.timeline.gaps}
    return [
        (node, Span(node.start_us or 0.0, node.end_us, gaps.get(node.index), branch))
        for node, branch in measured
    ]


def _rows(
    graph: GraphRecord, spans: Sequence[tuple[Node, Span]], *, has_branches: bool
) -> Iterator[Row]:
    parts = node_parts(graph)
    for node, span in spans:
        part = parts[node.index]
        values = (
            node.short_name, span.begin, node.duration_us, span.gap,
            *([span.branch + 1] if has_branches else []), span,
            source_cell([node]) or None, part or None, node.module or None,
        )  # fmt: skip
        yield node_row(graph, node, values, part)


def node_branches(record: GraphRecord) -> list[int | None]:
    """Return the branch of each node, from 0; ``None`` for a node whose time was not measured.

    A node continues the branch of a node that it waits for. If another node continues that branch
    already, it takes the first one that is idle when it starts. Nodes of one branch may overlap:
    the target of a programmatic edge starts early, and starts and durations are medians of
    several replays, so that up to half of the shorter node is no sign of two branches.
    """
    waits_for: dict[int, set[int]] = defaultdict(set)
    for edge in record.edges:
        waits_for[edge.target].add(edge.source)
    branches: dict[int, int] = {}
    last: list[Node] = []
    for node in record.timeline.nodes:
        branch = _branch(node, last, waits_for[node.index])
        last[branch : branch + 1] = [node]
        branches[node.index] = branch
    return [branches.get(node.index) for node in record.nodes]


def _branch(node: Node, last: Sequence[Node], sources: set[int]) -> int:
    """Return the branch of a node after the last nodes of the branches so far."""
    continued = (place for place, before in enumerate(last) if before.index in sources)
    idle = (place for place, before in enumerate(last) if _is_over(before, node))
    return next(continued, next(idle, len(last)))


def _is_over(before: Node, node: Node) -> bool:
    shorter = min(before.duration_us or 0.0, node.duration_us or 0.0)
    return before.end_us - (node.start_us or 0.0) <= shorter / 2
