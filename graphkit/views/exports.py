"""A record in the forms that files take, by suffix."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType

from graphkit.errors import ConfigError, RecordError
from graphkit.records import (
    AuditReport,
    BenchReport,
    CaptureRecord,
    DiffRecord,
    GenerateRecord,
    Record,
    RecordWithGraphs,
    require_graphs,
    title_of,
)
from graphkit.views.audit import audit_view
from graphkit.views.bench import bench_view
from graphkit.views.capture import capture_view
from graphkit.views.diff import diff_view
from graphkit.views.dot import dot_of
from graphkit.views.figures import listed
from graphkit.views.generate import generate_view
from graphkit.views.graph import graph_view
from graphkit.views.inspect import inspect_view
from graphkit.views.page import page_of
from graphkit.views.selection import Titled, narrowed, selected
from graphkit.views.svg import svg_of
from graphkit.views.trace import trace_of


@dataclass(frozen=True, slots=True)
class Export:
    """What to write.

    Attributes:
        record: Of any kind.
        mode, batch_size: The graphs of these alone; all of them if ``None``.
    """

    record: Record
    mode: str | None = None
    batch_size: int | None = None

    @property
    def is_whole(self) -> bool:
        """Whether nothing was selected."""
        return self.mode is None and self.batch_size is None

    def graphed(self) -> tuple[RecordWithGraphs, tuple[Titled, ...]]:
        """The record and the selected graphs, of which there is at least one.

        Raises:
            RecordError: The record holds no graphs.
            ConfigError: It has no such mode or size.
        """
        record = require_graphs(self.record)
        graphs = selected(record, mode=self.mode, batch_size=self.batch_size)
        if not graphs:
            raise RecordError(
                "the record holds no nodes: it was made without looking into graphs. "
                "Capture again with their nodes, or export to .json or .svg."
            )
        return record, graphs


def _json(export: Export) -> str:
    return (export.record if export.is_whole else narrowed(*export.graphed())).to_json()


def _html(export: Export) -> str:
    return page_of(*export.graphed())


def _trace(export: Export) -> str:
    return trace_of(export.graphed()[1])


def _dot(export: Export) -> str:
    (title, graph), *others = export.graphed()[1]
    if others:
        names = listed([title, *(name for name, _ in others)])
        raise ConfigError(
            f"dot shows one graph, these are {len(others) + 1}: {names}. "
            "Choose one with --mode and --batch-size; its name may stand for the mode."
        )
    return dot_of(graph, title)


_VIEWS: Mapping[type[Record], Callable[[Any], RenderableType]] = {
    AuditReport: audit_view,
    BenchReport: bench_view,
    CaptureRecord: capture_view,
    DiffRecord: diff_view,
    GenerateRecord: generate_view,
}
"""Those of whole records; others are shown as what is in their graphs."""


def _svg(export: Export) -> str:
    record = export.record
    title = title_of(record) if isinstance(record, RecordWithGraphs) else ""
    return svg_of(_view(export), title=f"graphkit {record.KIND}: {title}".rstrip(": "))


def _view(export: Export) -> RenderableType:
    record = export.record
    if not export.is_whole:
        return Group(*(graph_view(graph, title) for title, graph in export.graphed()[1]))
    view = _VIEWS.get(type(record))
    return view(record) if view else inspect_view(require_graphs(record))


FORMATS: Mapping[str, Callable[[Export], str]] = {
    ".json": _json,
    ".html": _html,
    ".svg": _svg,
    ".dot": _dot,
    ".trace.json": _trace,
}
"""What makes a file's text, by its suffix. Each raises RecordError or ConfigError for a record or a
selection that has no such form."""
