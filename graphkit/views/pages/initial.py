"""Pages that a record opens with."""

from __future__ import annotations

from dataclasses import replace

from graphkit.records import CaptureRecord, GraphRecord, RecordWithGraphs
from graphkit.views.formatting import environment_facts
from graphkit.views.pages.graph import graph_page
from graphkit.views.pages.graph_groups import graph_groups
from graphkit.views.pages.kernels import kernels_page
from graphkit.views.pages.overview import foreign_page, overview_page
from graphkit.views.pages.page_model import Page
from graphkit.views.pages.timeline import timeline_page
from graphkit.views.selection import select_graphs

PAGES_BY = {"module": graph_page, "kernel": kernels_page, "time": timeline_page}
"""Pages of the nodes of a graph by their order: in modules, by kernel, or as they ran."""


def first_page(record: RecordWithGraphs) -> Page:
    """Return the page of the whole record; of a graph, its own page and where it was made."""
    if isinstance(record, CaptureRecord):
        return overview_page(record)
    if isinstance(record, GraphRecord):
        page = graph_page(graph_groups(record)[0], 0)
        return replace(page, facts=(*page.facts, *environment_facts(record)))
    return foreign_page(record)


def initial_pages(
    record: RecordWithGraphs,
    *,
    mode: str | None = None,
    batch_size: int | None = None,
    by: str = "module",
) -> tuple[Page, ...]:
    """Return the page of the whole record, followed by the selected graph's.

    Args:
        record: A record of a capture, of a foreign program or of a graph.
        mode: Selects the first graph of this mode, or the graph of this name.
        batch_size: Selects the first graph of this size.
        by: How to show the selected graph, or the first one: a key of ``PAGES_BY``.

    Raises:
        ConfigError: The record has no such mode or size.
    """
    selected = select_graphs(record, mode=mode, batch_size=batch_size)
    pages = [first_page(record)]
    is_whole = mode is None and batch_size is None
    if not selected or (is_whole and by == "module"):
        return tuple(pages)
    name = selected[0][0]
    group, index = next(
        (group, index)
        for group in graph_groups(record)
        for index, (other, _) in enumerate(group.graphs)
        if other == name
    )
    if not isinstance(record, GraphRecord):
        pages.append(graph_page(group, index))
    if by != "module":
        pages.append(PAGES_BY[by](group, index))
    return tuple(pages)
