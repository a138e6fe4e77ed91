"""A record with graphs as one HTML file that loads nothing."""

from __future__ import annotations

import gzip
import json
import math
import re
from base64 import b64encode
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from html import escape
from importlib.resources import files
from typing import Any

from graphkit.records import GraphRecord, RecordWithGraphs, extent, timeline_of, title_of
from graphkit.views.environment import environment_facts
from graphkit.views.formatting import plain, us
from graphkit.views.frames import frames_of
from graphkit.views.module_tree import nodes_in_modules
from graphkit.views.pages.kernels import kernels_page
from graphkit.views.parts import parts_of
from graphkit.views.phases import phases_of
from graphkit.views.replay import branches_of
from graphkit.views.selection import NamedGraph, with_only
from graphkit.views.times import further_time_facts, time_facts

_PLACEHOLDER = re.compile(r"\{\{(\w+)\}\}")
_SCRIPTS = (
    "format", "record", "nodes", "tree", "kernels", "details", "timeline", "zoom", "icicle",
    "start",
)  # fmt: skip
"""Files of the page's script, in order."""
_HEADS = ("#", "module", "node", "us", "grid", "block", "op")
_SUMS = ("nodes", "us", "share", "mean us", "bytes, at most", "GB/s")
"""Numbers of a kernel on the page, as its columns in the text; the last two where it has them."""


def html_of(record: RecordWithGraphs, graphs: Sequence[NamedGraph]) -> str:
    """Return HTML with charts of the replay and its modules, and tables of kernels and nodes.

    It embeds the record, with these graphs alone, as the JSON text of ``to_json``, compressed
    with gzip and encoded in base64. It opens with the first graph that has nodes. Without
    JavaScript, and in a browser without ``DecompressionStream``, it is a table of all nodes.
    """
    where = ", ".join(" ".join(fact) for fact in environment_facts(record))
    texts = {
        "title": escape(plain(f"graphkit {record.KIND}: {title_of(record)}")),
        "where": escape(plain(where)),
        "first": str(next((at for at, (_, graph) in enumerate(graphs) if graph.nodes), 0)),
        "record": _packed(with_only(record, graphs).to_json()),
        "views": _packed(json.dumps(_views(graphs), allow_nan=False)),
        "table": "".join(line for named in graphs for line in _table(*named)),
        "style": _asset("page.css"),
        "script": "\n".join(_asset(f"{name}.js") for name in _SCRIPTS),
    }
    return _PLACEHOLDER.sub(lambda found: texts[found[1]], _asset("page.html"))


def _asset(name: str) -> str:
    return files(__package__).joinpath("web", name).read_text(encoding="utf-8")


def _packed(text: str) -> str:
    """Return a text as base64 of gzip, equal in every run."""
    packed = gzip.compress(text.encode("utf-8", "surrogatepass"), mtime=0)
    return b64encode(packed).decode("ascii")


def _views(graphs: Sequence[NamedGraph]) -> list[dict[str, Any]]:
    """Return what the charts and the table of kernels show of each graph."""
    return [
        {"kernels": _kernels(graphs, index), **_charts(graph)}
        for index, (_, graph) in enumerate(graphs)
    ]


def _charts(graph: GraphRecord) -> dict[str, Any]:
    parts, (frames, places) = parts_of(graph), frames_of(graph)
    return {
        "phases": phases_of(graph),
        "parts": [parts[node.index] for node in graph.nodes],
        "branches": branches_of(graph),
        "gaps": [(gap.begin, gap.us) for gap in timeline_of(graph.nodes).gaps],
        "times": [*time_facts(graph), *further_time_facts(graph)],
        "frames": [asdict(frame) for frame in frames],
        "places": places,
    }


def _kernels(graphs: Sequence[NamedGraph], index: int) -> list[dict[str, Any]]:
    """Return the kernels of a graph as their page has them, the most expensive first."""
    page = kernels_page(graphs, index)
    names = [column.name for column in page.columns]
    found = []
    for row in page.rows:
        values = dict(zip(names, row.values, strict=True))
        found.append(
            {
                "key": row.key,
                "name": row.values[0],
                "note": row.note,
                **{name: _finite(values[name]) for name in _SUMS if name in values},
                "modules": [module.values[0] for module in row.children],
            }
        )
    return found


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value


def _table(title: str, graph: GraphRecord) -> Iterator[str]:
    yield f"<table><caption>{escape(plain(title))}</caption><tr>"
    yield from (f'<th scope="col">{head}</th>' for head in _HEADS)
    yield "</tr>\n"
    for modules, node in nodes_in_modules(graph):
        cells = (
            str(node.index), ".".join(modules), node.short_name, us(node.duration_us),
            extent(node.grid), extent(node.block), node.op,
        )  # fmt: skip
        yield f"<tr>{''.join(f'<td>{escape(plain(cell))}</td>' for cell in cells)}</tr>\n"
    yield "</table>\n"
