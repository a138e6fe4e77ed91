"""Formats that a record can be exported to, by file suffix."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console, Group, RenderableType

from graphkit.errors import RecordError
from graphkit.records import (
    AuditReport,
    BenchReport,
    CaptureRecord,
    DiffRecord,
    GenerateRecord,
    GraphRecord,
    MemoryEstimate,
    Record,
    RecordWithGraphs,
    require_graphs,
)
from graphkit.views.html import html_text
from graphkit.views.pages.comparison import diff_page
from graphkit.views.pages.graph import graph_page
from graphkit.views.pages.memory import memory_page
from graphkit.views.pages.page_model import GraphGroup
from graphkit.views.selection import NamedGraph, select_graphs, with_only
from graphkit.views.text.audit import audit_view
from graphkit.views.text.bench import bench_view
from graphkit.views.text.capture import capture_view, memory_view
from graphkit.views.text.generate import generate_view
from graphkit.views.text.inspect import inspect_view
from graphkit.views.text.page import LARGE, page_view
from graphkit.views.trace import trace_text

_FONT_FACES = re.compile(r"@font-face\s*{.*?}", re.DOTALL)
_SVG_WIDTH = 100
_NOT_XML = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")


def diff_view(record: DiffRecord) -> RenderableType:
    """Return what differs between two records: environments, figures, and nodes by graph."""
    return page_view(diff_page(record), is_expanded=False)


_VIEWS: Mapping[type[Record], Callable[[Any], RenderableType]] = {
    AuditReport: audit_view,
    BenchReport: bench_view,
    CaptureRecord: capture_view,
    DiffRecord: diff_view,
    GenerateRecord: generate_view,
    MemoryEstimate: memory_view,
}
"""Views of whole records by kind; ``inspect_view`` shows the other kinds."""


@dataclass(frozen=True, slots=True)
class Export:
    """A record and the graphs of it to write: of a mode and a size, or without those all."""

    record: Record
    mode: str | None = None
    batch_size: int | None = None

    @property
    def is_whole(self) -> bool:
        """True if neither a mode nor a size is selected."""
        return self.mode is None and self.batch_size is None

    def selected(self) -> tuple[RecordWithGraphs, tuple[NamedGraph, ...]]:
        """Return the record and the selected graphs; at least one.

        Raises:
            RecordError: The record holds no graphs.
            ConfigError: It has no such mode or size.
        """
        record = require_graphs(self.record)
        graphs = select_graphs(record, mode=self.mode, batch_size=self.batch_size)
        if not graphs:
            raise RecordError(
                "the record holds no nodes: the capture was not inspected. Save one with "
                "graphkit inspect TARGET --json, or export to .json or .svg."
            )
        return record, graphs


def _json(export: Export) -> str:
    return (export.record if export.is_whole else with_only(*export.selected())).to_json()


def _svg(export: Export) -> str:
    record = export.record
    name = record.title if isinstance(record, RecordWithGraphs) else ""
    title = f"graphkit {record.KIND}: {name}".rstrip(": ")
    console = Console(
        record=True, width=_SVG_WIDTH, file=io.StringIO(), force_terminal=True,
        color_system="truecolor", _environ={},
    )  # fmt: skip
    console.print(_view(export))
    return offline(console.export_svg(title=title, unique_id="graphkit"))


def _view(export: Export) -> RenderableType:
    record = export.record
    if not export.is_whole or (isinstance(record, GraphRecord) and record.nodes):
        return Group(*map(_graph_view, export.selected()[1]))
    view = _VIEWS.get(type(record))
    return view(record) if view else inspect_view(require_graphs(record))


def _graph_view(named: NamedGraph) -> RenderableType:
    """Return the page of a graph and, closed, the page of its memory."""
    group = GraphGroup((named,))
    shown = page_view(graph_page(group, 0), is_expanded=len(named[1].nodes) < LARGE)
    if named[1].memory is None:
        return shown
    return Group(shown, "", page_view(memory_page(group, 0), is_expanded=False))


def offline(svg: str) -> str:
    """Return an SVG of rich without the font of the web that it loads, and as valid XML."""
    style, end, rest = svg.partition("</style>")
    style = _FONT_FACES.sub("", style).replace("Fira Code", "ui-monospace")
    return _NOT_XML.sub("", style + end + rest)


FORMATS: Mapping[str, Callable[[Export], str]] = {
    ".json": _json,
    ".html": lambda export: html_text(*export.selected()),
    ".svg": _svg,
    ".trace.json": lambda export: trace_text(export.selected()[1]),
}
"""Functions that return a file's text, by suffix. Each raises RecordError or ConfigError for a
record or a selection that the format cannot hold."""
