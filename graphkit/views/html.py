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

from graphkit.records import (
    CaptureRecord,
    GraphRecord,
    RecordWithGraphs,
    extent,
    figure_heading,
)
from graphkit.views.environment import environment_facts
from graphkit.views.formatting import plain, size, us
from graphkit.views.frames import frames_of
from graphkit.views.module_tree import nodes_in_modules
from graphkit.views.pages.graph import graph_facts
from graphkit.views.pages.kernels import BYTES_NOTE, kernels_page
from graphkit.views.parts import parts_of
from graphkit.views.phases import phases_of
from graphkit.views.replay import branches_of
from graphkit.views.selection import NamedGraph, with_only
from graphkit.views.times import PROFILED

_PLACEHOLDER = re.compile(r"\{\{(\w+)\}\}")
_SCRIPTS = (
    "format", "record", "nodes", "tree", "kernels", "details", "timeline", "zoom", "icicle",
    "start",
)  # fmt: skip
"""Files of the page's script, in order."""
_HEADS = ("#", "module", "node", "us", "grid", "block", "op")
_SIZE_TIMES = ("capture_ms", "replay_us", "eager_us")
_NUMBER = ' class="number"'
_SUMS = ("nodes", "us", "share", "mean us", "bytes, at most", "GB/s")
"""Numbers of a kernel on the page, as its columns in the text; the last two where it has them."""


def html_of(record: RecordWithGraphs, graphs: Sequence[NamedGraph]) -> str:
    """Return HTML with charts of the replay and its modules, and tables of kernels and nodes.

    It embeds the record, with these graphs alone, as the JSON text of ``to_json``, compressed
    with gzip and encoded in base64. It opens with the first graph that has nodes. Without
    JavaScript, and in a browser without ``DecompressionStream``, it is a table of all nodes.
    """
    first = next((at for at, (_, graph) in enumerate(graphs) if graph.nodes), 0)
    where = ", ".join(" ".join(fact) for fact in environment_facts(record))
    texts = {
        "title": escape(plain(f"graphkit {record.KIND}: {record.title}")),
        "where": escape(plain(where)),
        "first": str(first),
        "facts": _facts(graphs[first][1]) if graphs else "",
        "sizes": "".join(_sizes(record)),
        "profiled": PROFILED,
        "bytes": BYTES_NOTE,
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
        "gaps": [(gap.begin, gap.us) for gap in graph.timeline.gaps],
        "facts": [*graph_facts(graph)],
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


def _facts(graph: GraphRecord) -> str:
    """Return the facts of the first graph, which are in sight while the record is unpacked."""
    pairs = ((escape(plain(name)), escape(plain(text))) for name, text in graph_facts(graph))
    return "".join(f"<div><dt>{name}</dt><dd>{text}</dd></div>" for name, text in pairs)


def _sizes(record: RecordWithGraphs) -> Iterator[str]:
    if not isinstance(record, CaptureRecord) or not record.sizes:
        return
    heads = ("mode", "size", "nodes", "pool", *map(figure_heading, _SIZE_TIMES))
    yield f"<details><summary>captured sizes: {len(record.sizes)}</summary>"
    yield '<div class="wide"><table><thead><tr>'
    yield from (f'<th scope="col"{_NUMBER * bool(at)}>{head}</th>' for at, head in enumerate(heads))
    yield "</tr></thead><tbody>"
    for mode in record.modes:
        for each in mode.sizes:
            times = (us(getattr(each, name)) for name in _SIZE_TIMES)
            cells = str(each.batch_size), str(each.num_nodes), size(each.pool_bytes), *times
            numbers = "".join(f"<td{_NUMBER}>{cell}</td>" for cell in cells)
            yield f"<tr><td>{escape(plain(mode.mode))}</td>{numbers}</tr>"
    yield "</tbody></table></div></details>"


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
