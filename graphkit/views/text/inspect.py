"""A record with graphs as text: its page, the buffers of its modes, and every graph."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from rich.console import Group, RenderableType
from rich.text import Text

from graphkit.records import CaptureRecord, GraphRecord, RecordWithGraphs
from graphkit.views.pages.initial import PAGES_BY, first_page, graph_groups
from graphkit.views.pages.memory import buffers_page, memory_page
from graphkit.views.pages.page_model import Page
from graphkit.views.selection import NamedGraph, is_mode, select_graphs, with_only
from graphkit.views.text.page import page_view


def inspect_view(
    record: RecordWithGraphs,
    *,
    mode: str | None = None,
    batch_size: int | None = None,
    by: str = "module",
    has_pictures: bool = True,
) -> RenderableType:
    """Return the pages that the screen shows of a record, one below the other.

    Args:
        record: A record of a capture, of a foreign program or of a graph.
        mode: Shows only this forward mode, or the graph of this name.
        batch_size: Shows only this captured size.
        by: How to show the nodes of a graph, a key of ``PAGES_BY``.
        has_pictures: False leaves out bars and other pictures, which a screen reader cannot read.

    Raises:
        ConfigError: The record has no such mode or size.
    """
    graphs = select_graphs(record, mode=mode, batch_size=batch_size)
    pages = _pages(record, graphs, mode, batch_size, by)
    parts: list[RenderableType] = [
        page_view(page if has_pictures else page.without_pictures(), is_expanded=is_expanded)
        for page, is_expanded in pages
    ]
    if not graphs:
        parts.append(Text("The record holds no nodes: the capture was not inspected."))
    return Group(*(shown for part in parts for shown in (part, "")))


def _pages(
    record: RecordWithGraphs,
    graphs: tuple[NamedGraph, ...],
    mode: str | None,
    batch_size: int | None,
    by: str,
) -> Iterator[tuple[Page, bool]]:
    """Yield the pages, and whether the rows inside every row are shown."""
    if isinstance(record, CaptureRecord):
        modes = [captured for captured in record.modes if is_mode(mode, captured.mode)]
        shown = (
            replace(
                captured,
                sizes=tuple(s for s in captured.sizes if batch_size in (None, s.batch_size)),
            )
            for captured in modes
        )
        yield first_page(replace(record, modes=tuple(shown))), True
        for index, captured in enumerate(record.modes):
            if captured in modes and captured.buffers:
                yield buffers_page(record.modes, index), True
    elif by == "module" or not isinstance(record, GraphRecord):
        yield first_page(with_only(record, graphs)), True
    for group in graph_groups(record):
        for index, graph in ((at, g) for at, g in enumerate(group.graphs) if g in graphs):
            if by != "module" or not isinstance(record, GraphRecord):
                yield PAGES_BY[by](group, index), True
            if by == "module" and graph[1].memory:
                yield memory_page(group, index), False
