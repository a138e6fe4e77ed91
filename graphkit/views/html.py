"""A record with graphs as one HTML file that loads nothing."""

from __future__ import annotations

import gzip
import io
import json
import re
from base64 import b64encode
from collections.abc import Iterator, Sequence
from dataclasses import replace
from html import escape
from importlib.resources import files
from typing import Any

from rich.console import Console

from graphkit.records import (
    CaptureRecord,
    GraphRecord,
    RecordWithGraphs,
    figure_heading,
)
from graphkit.views.facts import PROFILED, environment_facts, graph_facts
from graphkit.views.formatting import plain, size, us
from graphkit.views.html_data import details, drawing
from graphkit.views.pages.graph import picture_page
from graphkit.views.pages.kernels import BYTES_NOTE
from graphkit.views.selection import NamedGraph, with_only
from graphkit.views.text.page import page_view

_PLACEHOLDER = re.compile(r"\{\{(\w+)\}\}")
_SCRIPTS = "elements", "page", "timeline", "zoom", "modules", "nodes", "details", "start"
"""Files of the page's script, in order."""
_SIZE_TIMES = ("capture_ms", "replay_us", "eager_us")
_NUMBER = ' class="number"'
_TEXT_WIDTH = 100


def html_text(record: RecordWithGraphs, graphs: Sequence[NamedGraph]) -> str:
    """Return HTML with charts of the replay and its modules, and tables of kernels and nodes.

    It opens with the first graph that has nodes. The script draws ``drawing``, which is plain
    JSON, as soon as the file is read. Details of nodes and the record itself, with these graphs
    alone, are JSON too, but compressed with gzip and encoded in base64: they are needed only when
    a node is opened or the record is saved. Without JavaScript, the page is text.
    """
    first = next((at for at, (_, graph) in enumerate(graphs) if graph.nodes), 0)
    where = ", ".join(" ".join(fact) for fact in environment_facts(record))
    later = {"record": with_only(record, graphs).to_json(), **details(graphs)}
    texts = {
        "title": escape(plain(f"graphkit {record.KIND}: {record.title}")),
        "kind": record.KIND,
        "where": escape(plain(where)),
        "first": str(first),
        "facts": _facts(graphs[first][1]) if graphs else "",
        "sizes": "".join(_sizes(record)),
        "profiled": PROFILED,
        "bytes": BYTES_NOTE,
        "drawing": _json(drawing(graphs)).replace("<", "\\u003c"),
        "later": b64encode(gzip.compress(_json(later).encode(), mtime=0)).decode("ascii"),
        "text": _text(graphs[first]) if graphs else "",
        "style": _asset("page.css"),
        "script": "\n".join(_asset(f"{name}.js") for name in _SCRIPTS),
    }
    return _PLACEHOLDER.sub(lambda match: texts[match[1]], _asset("page.html"))


def _json(value: Any) -> str:
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def _asset(name: str) -> str:
    return files(__package__).joinpath("web", name).read_text(encoding="utf-8")


def _facts(graph: GraphRecord) -> str:
    """Return the facts of the graph that the page opens with."""
    pairs = ((escape(plain(name)), escape(plain(text))) for name, text in graph_facts(graph))
    return "".join(f"<div><dt>{name}</dt><dd>{text}</dd></div>" for name, text in pairs)


def _text(named: NamedGraph) -> str:
    """Return the page of a graph as text; of equal layers, only the first one's nodes."""
    console = Console(width=_TEXT_WIDTH, file=io.StringIO(), color_system=None, _environ={})
    page = replace(picture_page(named).without_pictures(), facts=())  # above it already
    console.print(page_view(page))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    return "\n".join(escape(line.rstrip(), quote=False) for line in lines) + "\n\n"


def _sizes(record: RecordWithGraphs) -> Iterator[str]:
    if not isinstance(record, CaptureRecord) or not record.sizes:
        return
    heads = ("mode", "size", "nodes", "pool", *map(figure_heading, _SIZE_TIMES))
    yield f"<details><summary>captured sizes: {len(record.sizes)}</summary>"
    yield '<div class="wide"><table><thead><tr>'
    yield from (f'<th scope="col"{_NUMBER * bool(at)}>{head}</th>' for at, head in enumerate(heads))
    yield "</tr></thead><tbody>"
    for mode in record.modes:
        for captured in mode.sizes:
            times = (us(getattr(captured, name)) for name in _SIZE_TIMES)
            cells = (
                f"{captured.batch_size}", f"{captured.num_nodes}", size(captured.pool_bytes), *times
            )  # fmt: skip
            numbers = "".join(f"<td{_NUMBER}>{cell}</td>" for cell in cells)
            yield f"<tr><td>{escape(plain(mode.mode))}</td>{numbers}</tr>"
    yield "</tbody></table></div></details>"
