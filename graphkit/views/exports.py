"""Formats that a record can be exported to, by file suffix."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from rich.console import Group, RenderableType

from graphkit.errors import RecordError
from graphkit.records import (
    AuditReport,
    BenchReport,
    CaptureRecord,
    DiffRecord,
    GenerateRecord,
    GraphRecord,
    Record,
    RecordWithGraphs,
    require_graphs,
)
from graphkit.views.audit import audit_view
from graphkit.views.bench import bench_view
from graphkit.views.capture import capture_view
from graphkit.views.diff import diff_view
from graphkit.views.dot import dot_of
from graphkit.views.equal_layers import equal_layers
from graphkit.views.generate import generate_view
from graphkit.views.html import html_of
from graphkit.views.inspect import inspect_view
from graphkit.views.page_view import page_view
from graphkit.views.pages import graph_page, memory_page
from graphkit.views.pages.graph_groups import GraphGroup
from graphkit.views.pages.page import Row
from graphkit.views.phases import step_tree
from graphkit.views.selection import NamedGraph, select_graphs, with_only
from graphkit.views.svg import svg_of
from graphkit.views.trace import trace_of


@dataclass(frozen=True, slots=True)
class Export:
    """A record and the graphs of it to write.

    Attributes:
        record: Of any kind.
        mode, batch_size: Selects graphs of this mode and size; ``None`` selects all.
    """

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


def _html(export: Export) -> str:
    return html_of(*export.selected())


def _trace(export: Export) -> str:
    return trace_of(export.selected()[1])


def _dot(export: Export) -> str:
    return dot_of(export.selected()[1])


_VIEWS: Mapping[type[Record], Callable[[Any], RenderableType]] = {
    AuditReport: audit_view,
    BenchReport: bench_view,
    CaptureRecord: capture_view,
    DiffRecord: diff_view,
    GenerateRecord: generate_view,
}
"""Views of whole records by kind; ``inspect_view`` shows the other kinds."""


def _svg(export: Export) -> str:
    record = export.record
    title = record.title if isinstance(record, RecordWithGraphs) else ""
    return svg_of(_view(export), title=f"graphkit {record.KIND}: {title}".rstrip(": "))


def _view(export: Export) -> RenderableType:
    record = export.record
    if not export.is_whole or (isinstance(record, GraphRecord) and record.nodes):
        return Group(*map(_graph_view, export.selected()[1]))
    view = _VIEWS.get(type(record))
    return view(record) if view else inspect_view(require_graphs(record))


def _graph_view(named: NamedGraph) -> RenderableType:
    """Return the pages of a graph and its memory; of equal layers, only the first one's nodes."""
    page, (_, graph) = graph_page(GraphGroup((named,)), 0), named
    equal = equal_layers(step_tree(graph))
    shown = page_view(replace(page, rows=tuple(_closed(page.rows, equal))))
    if graph.memory is None:
        return shown
    return Group(shown, "", page_view(memory_page((named,), 0), is_expanded=False))


def _closed(rows: Iterable[Row], equal: Mapping[str, str]) -> Iterator[Row]:
    """Yield the rows without those inside of layers that equal an earlier one."""
    for row in rows:
        around = f"{row.key}."
        first = next((each for path, each in equal.items() if around.startswith(f"{path}.")), None)
        if first is not None:
            name, *others = row.values
            yield replace(row, values=(f"{name}, as {first}", *others), make_children=None)
        elif row.make_children and not row.is_run:
            yield replace(row, make_children=partial(_closed, row.children, equal))
        else:
            yield row


FORMATS: Mapping[str, Callable[[Export], str]] = {
    ".json": _json,
    ".html": _html,
    ".svg": _svg,
    ".dot": _dot,
    ".trace.json": _trace,
}
"""Functions that return a file's text, by suffix. Each raises RecordError or ConfigError for a
record or a selection that the format cannot hold."""
