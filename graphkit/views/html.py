"""A record with graphs as one HTML file that loads nothing; its script draws plain JSON."""

from __future__ import annotations

import gzip
import io
import json
import math
import re
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from rich.console import Console

from graphkit.records import GraphRecord, Node, RecordWithGraphs, count_of, extent
from graphkit.views.formatting import (
    PROFILED,
    environment_facts,
    graph_facts,
    plain,
    us,
    within_one,
)
from graphkit.views.module_tree import node_parts, nodes_in_modules, source_cell, total_us
from graphkit.views.pages.graph import graph_page
from graphkit.views.pages.kernels import BYTES_NOTE, kernels_page
from graphkit.views.pages.node import NODE_COLUMNS, argument_rows, node_facts
from graphkit.views.pages.page_model import GraphGroup, Page, Row
from graphkit.views.pages.timeline import replay_spans
from graphkit.views.selection import NamedGraph, with_only
from graphkit.views.text.page import LARGE, flatten, page_view

_PLACEHOLDER = re.compile(r"\{\{(\w+)\}\}")
_TEXT_WIDTH = 100
_UNKNOWN = {"bytes, at most": "unknown", "GB/s": "-", "us": "-", "share": "-"}
"""Texts of empty cells of a kernel; the note of its row has the reason."""


def html_text(record: RecordWithGraphs, graphs: Sequence[NamedGraph]) -> str:
    """Return HTML with charts of the replay and its modules, and tables of kernels and nodes.

    It opens with the first graph that has nodes. What the script draws, and the record with these
    graphs alone, which the page can save, are JSON that is compressed with gzip and encoded in
    base64. Without JavaScript, the page is text.
    """
    first = next((at for at, (_, graph) in enumerate(graphs) if graph.nodes), 0)
    where = ", ".join(" ".join(fact) for fact in environment_facts(record))
    data = {"record": with_only(record, graphs).to_json(), "graphs": drawing(graphs)}
    packed = gzip.compress(json.dumps(data, allow_nan=False).encode(), mtime=0)
    texts = {
        "title": escape(plain(f"graphkit {record.KIND}: {record.title}")),
        "kind": record.KIND,
        "where": escape(plain(where)),
        "first": str(first),
        "profiled": PROFILED,
        "bytes": BYTES_NOTE,
        "data": b64encode(packed).decode("ascii"),
        "text": _text(graphs[first]) if graphs else "",
        "style": _asset("page.css"),
        "script": "\n".join(map(_asset, ("tables.js", "charts.js"))),
    }
    return _PLACEHOLDER.sub(lambda match: texts[match[1]], _asset("page.html"))


def _asset(name: str) -> str:
    return files(__package__).joinpath("web", name).read_text(encoding="utf-8")


def _text(named: NamedGraph) -> str:
    """Return the page of a graph as text; of a large one, the rows that the screen opens with."""
    console = Console(width=_TEXT_WIDTH, file=io.StringIO(), color_system=None, _environ={})
    page = graph_page(GraphGroup((named,)), 0).without_pictures()
    console.print(page_view(page, is_expanded=len(named[1].nodes) < LARGE))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    return "\n".join(escape(line.rstrip(), quote=False) for line in lines) + "\n\n"


def drawing(graphs: Sequence[NamedGraph]) -> list[dict[str, Any]]:
    """Return what the charts, the trees and the tables show of graphs, as values for JSON.

    Texts are as shown, times in us, and nodes are named by their positions.
    """
    return [_graph(graphs, index) for index in range(len(graphs))]


def _graph(graphs: Sequence[NamedGraph], index: int) -> dict[str, Any]:
    named = graphs[index]
    title, graph = named
    positions = {id(node): at for at, node in enumerate(graph.nodes)}
    page = graph_page(GraphGroup((named,)), 0)
    return {
        "title": plain(title),
        "us": _finite(total_us(graph.nodes)),
        "facts": [(name, plain(text)) for name, text in graph_facts(graph)],
        "nodes": list(_nodes(graph)),
        "edges": list(_edges(graph, positions)),
        "tree": [_branch(page, row, positions) for row in page.rows],
        "kernels": _kernels(graphs, index, positions),
        **_replay(graph, positions),
    }


def _nodes(graph: GraphRecord) -> Iterator[dict[str, Any]]:
    parts, positions = node_parts(graph), {node.index: at for at, node in enumerate(graph.nodes)}
    for modules, node in nodes_in_modules(graph):
        # An earlier node alone: a node inside of a later one is damaged, and could lead in circles.
        is_inside = node.parent is not None and node.parent < node.index
        texts = {
            "index": f"{node.index}", "name": node.short_name, "source": source_cell([node]),
            "module": ".".join(modules), "op": node.op, "grid": extent(node.grid),
            "part": parts[node.index] or "other",
        }  # fmt: skip
        yield {
            **{name: plain(text) for name, text in texts.items()},
            "us": _finite(node.duration_us),
            "holder": positions.get(node.parent or 0, -1) if is_inside else -1,
            "facts": [*node_facts(node)],
            "arguments": _arguments(node),
        }


def _arguments(node: Node) -> list[tuple[str, ...]]:
    """Return the arguments of a node as on its page."""
    page = Page(title="", columns=NODE_COLUMNS, rows=tuple(argument_rows(node)))
    return [page.cells(line.row) for line in flatten(page.rows)]


def _edges(graph: GraphRecord, positions: Mapping[int, int]) -> Iterator[tuple[int, int, str]]:
    known = {node.index: positions[id(node)] for node in graph.nodes}
    for edge in graph.edges:
        if edge.source in known and edge.target in known:
            kind = "" if edge.kind == "full" else f" ({plain(edge.kind)})"
            yield known[edge.source], known[edge.target], kind


def _branch(page: Page, row: Row, positions: Mapping[int, int]) -> int | dict[str, Any]:
    """Return the position of a node; of a module what its row says, and the rows inside it."""
    if row.make_children is None:
        return positions[id(row.nodes[0])]
    cells = dict(zip((column.name for column in page.columns), page.cells(row), strict=True))
    return {
        "name": cells["module and node"],
        "time": cells.get("us") or "-",
        "share": _share(total_us(row.nodes), total_us(page.nodes)),
        "isOpen": row.key in page.opened,
        "isRun": row.is_run,
        "rows": [_branch(page, child, positions) for child in row.children],
    }


def _kernels(
    graphs: Sequence[NamedGraph], index: int, positions: Mapping[int, int]
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
                "cells": [cells[at] or _UNKNOWN.get(names[at], "") for at in shown],
                "note": plain(row.note),
                "share": _share(total_us(row.nodes), total_us(page.nodes)),
                "modules": [plain(module.values[0]) for module in row.children],
                "nodes": [positions[id(node)] for node in row.nodes],
            }
        )
    return {"heads": ["kernel", *(names[at] for at in shown[1:]), "modules"], "rows": rows}


def _replay(graph: GraphRecord, positions: Mapping[int, int]) -> dict[str, Any]:
    """Return bars with the gaps before them, the time of each part, and a sentence about them."""
    spans = [pair for pair in replay_spans(graph) if math.isfinite(pair[1].end)]
    end = max((span.end for _, span in spans), default=0.0) or 1.0
    gaps = [span.gap for _, span in spans if span.gap]
    bars = [  # times to the nanosecond, which is what profilers measure
        (positions[id(node)], round(span.begin, 3), round(span.gap or 0.0, 3), span.branch)
        for node, span in spans
    ]
    branches = 1 + max((span.branch for _, span in spans), default=0)
    side = f"{branches} branches" if branches > 1 else "1 branch"
    summary = (
        f"{count_of(len(bars), 'node')} in {side}, {us(end)} us of profiled replays, by the median "
        f"times of nodes; {count_of(len(gaps), 'gap')}, {us(sum(gaps))} us ({sum(gaps) / end:.1%})"
    )
    return {
        "end": end, "bars": bars, "branches": branches,
        "parts": _parts(graph, [node for node, _ in spans]),
        "summary": summary if bars else "No replay of this graph was measured.",
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


def _share(part: float | None, whole: float | None) -> float:
    return round(within_one(part / whole), 4) if part is not None and whole else 0.0


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value
