"""What the script of a page draws: texts as they are shown, times in us, and shares of one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from graphkit.records import GraphRecord, Node, count_of, extent
from graphkit.views.facts import graph_facts
from graphkit.views.formatting import plain, us, within_one
from graphkit.views.frames import module_frames
from graphkit.views.lines import flatten
from graphkit.views.module_tree import node_parts, nodes_in_modules, total_us
from graphkit.views.pages.graph import graph_page
from graphkit.views.pages.kernels import kernels_page
from graphkit.views.pages.node import NODE_COLUMNS, argument_rows, node_facts
from graphkit.views.pages.page_model import GraphGroup, Page, Row
from graphkit.views.pages.timeline import replay_spans
from graphkit.views.selection import NamedGraph
from graphkit.views.source_code import source_cell

_UNKNOWN = {"bytes, at most": "unknown", "GB/s": "-", "us": "-", "share": "-"}
"""Texts of empty cells of a kernel; the note of its row has the reason."""


class _Texts(dict[str, int]):
    """Numbers the texts of a page, so that one which many nodes share is written once."""

    def __missing__(self, text: str) -> int:
        self[text] = len(self)
        return self[text]


def drawing(graphs: Sequence[NamedGraph]) -> dict[str, Any]:
    """Return what the charts, the trees and the tables show of graphs, as values for JSON.

    Nodes are lists in record order: numbers of texts, ``us``, the node around it and its frame.
    Everything else names a node by its position. ``web/page.js`` has the reader.
    """
    texts = _Texts()
    drawn = [_graph(graphs, index, texts) for index in range(len(graphs))]
    return {"texts": list(texts), "graphs": drawn}


def details(graphs: Sequence[NamedGraph]) -> dict[str, Any]:
    """Return what the panel of each node shows: facts, and arguments as on the page of a node.

    All facts are before all arguments: this compresses to two thirds of both node by node.
    """
    return {
        "facts": [[[*node_facts(node)] for node in graph.nodes] for _, graph in graphs],
        "arguments": [[_arguments(node) for node in graph.nodes] for _, graph in graphs],
    }


def _arguments(node: Node) -> list[tuple[str, ...]]:
    page = Page(title="", columns=NODE_COLUMNS, rows=tuple(argument_rows(node)))
    return [page.cells(line.row) for line in flatten(page.rows)]


def _graph(graphs: Sequence[NamedGraph], index: int, texts: _Texts) -> dict[str, Any]:
    named = graphs[index]
    title, graph = named
    positions = {id(node): at for at, node in enumerate(graph.nodes)}
    page = graph_page(GraphGroup((named,)), 0)
    frames, places = module_frames(graph)
    whole = frames[0].width or 1.0
    return {
        "title": plain(title),
        "us": _finite(total_us(graph.nodes)),
        "facts": [(name, plain(text)) for name, text in graph_facts(graph)],
        "nodes": list(_nodes(graph, places, texts)),
        "edges": list(_edges(graph, positions)),
        "tree": [_branch(page, row, positions, texts) for row in page.rows],
        "kernels": _kernels(graphs, index, positions, texts),
        "frames": [
            (plain(frame.name or title), plain(frame.describe(title, frames[0].us)), frame.parent,
             round(frame.begin / whole, 7), round(frame.width / whole, 7), frame.part)
            for frame in frames
        ],
        **_replay(graph, positions),
    }  # fmt: skip


def _nodes(graph: GraphRecord, places: Sequence[int], texts: _Texts) -> Iterator[list[Any]]:
    parts, positions = node_parts(graph), {node.index: at for at, node in enumerate(graph.nodes)}
    for (modules, node), frame in zip(nodes_in_modules(graph), places, strict=True):
        # An earlier node alone: a node inside of a later one is damaged, and could lead in circles.
        is_inside = node.parent is not None and node.parent < node.index
        said = (
            f"{node.index}", node.short_name, source_cell([node]), ".".join(modules), node.op,
            extent(node.grid), extent(node.block), node.kind, parts[node.index] or "other",
        )  # fmt: skip
        around = positions.get(node.parent, -1) if is_inside and node.parent is not None else -1
        yield [*(texts[plain(text)] for text in said), _finite(node.duration_us), around, frame]


def _edges(graph: GraphRecord, positions: Mapping[int, int]) -> Iterator[tuple[int, int, str]]:
    known = {node.index: positions[id(node)] for node in graph.nodes}
    for edge in graph.edges:
        if edge.source in known and edge.target in known:
            kind = "" if edge.kind == "full" else f" ({plain(edge.kind)})"
            yield known[edge.source], known[edge.target], kind


def _branch(page: Page, row: Row, positions: Mapping[int, int], texts: _Texts) -> int | list[Any]:
    """Return the position of a node; of a module its name, time, share, if it is open, rows."""
    if row.make_children is None:
        return positions[id(row.nodes[0])]
    cells = dict(zip((column.name for column in page.columns), page.cells(row), strict=True))
    inside = (_branch(page, child, positions, texts) for child in row.children)
    name, time = texts[cells["module and node"]], texts[cells.get("us") or "-"]
    share = _share(total_us(row.nodes), total_us(page.nodes))
    return [name, time, share, int(row.key in page.opened), *inside]


def _kernels(
    graphs: Sequence[NamedGraph], index: int, positions: Mapping[int, int], texts: _Texts
) -> dict[str, Any]:
    """Return the rows of the page of kernels, without the nodes inside of modules."""
    page = kernels_page(GraphGroup(tuple(graphs)), index).without_pictures()
    names = [column.name for column in page.columns]
    shown = [at for at, name in enumerate(names) if name]
    rows = []
    for row in page.rows:
        cells = page.cells(row)
        rows.append(
            {
                "cells": [texts[cells[at] or _UNKNOWN.get(names[at], "")] for at in shown],
                "note": texts[plain(row.note)],
                "share": _share(total_us(row.nodes), total_us(page.nodes)),
                "modules": [texts[plain(module.values[0])] for module in row.children],
                "nodes": [positions[id(node)] for node in row.nodes],
            }
        )
    return {"heads": ["kernel", *(names[at] for at in shown[1:]), "modules"], "rows": rows}


def _replay(graph: GraphRecord, positions: Mapping[int, int]) -> dict[str, Any]:
    """Return bars with the gaps before them, the time of each part, and a sentence about them."""
    spans = [pair for pair in replay_spans(graph) if math.isfinite(pair[1].end)]
    end = max((span.end for _, span in spans), default=0.0) or 1.0
    gaps = [span.gap for _, span in spans if span.gap]
    bars = [
        (positions[id(node)], _ns(span.begin), _ns(span.gap or 0.0), span.branch)
        for node, span in spans
    ]
    branches = 1 + max((span.branch for _, span in spans), default=0)
    return {
        "end": end, "bars": bars, "branches": branches,
        "parts": _parts(graph, [node for node, _ in spans]),
        "summary": _summary(len(bars), branches, end, gaps),
    }  # fmt: skip


def _parts(graph: GraphRecord, nodes: Sequence[Node]) -> list[tuple[str, str]]:
    """Return the parts of the replay with their times, the longest first."""
    parts, groups = node_parts(graph), dict[str, list[Node]]()
    for node in nodes:
        groups.setdefault(parts[node.index] or "other", []).append(node)
    times = {part: total_us(inside) or 0.0 for part, inside in groups.items()}
    return [
        (part, f"{part} {us(times[part])} us") for part in sorted(times, key=lambda p: -times[p])
    ]


def _summary(nodes: int, branches: int, end: float, gaps: Sequence[float]) -> str:
    if not nodes:
        return "No replay of this graph was measured."
    idle = sum(gaps)
    side = f"{branches} branches" if branches > 1 else "1 branch"
    return (
        f"{count_of(nodes, 'node')} in {side}, {us(end)} us of profiled replays, by the median "
        f"times of nodes; {count_of(len(gaps), 'gap')}, {us(idle)} us ({idle / end:.1%})"
    )


def _share(part: float | None, whole: float | None) -> float:
    return round(within_one(part / whole), 4) if part is not None and whole else 0.0


def _ns(time_us: float) -> float:
    """Return a time in us to the nanosecond, which is what profilers measure."""
    return round(time_us, 3)


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value
