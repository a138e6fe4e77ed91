"""Pages that a record opens with."""

from __future__ import annotations

from dataclasses import replace

from graphkit.records import CaptureRecord, GraphRecord, RecordWithGraphs
from graphkit.views.environment import environment_facts
from graphkit.views.pages.graph import graph_page
from graphkit.views.pages.graph_groups import graph_groups
from graphkit.views.pages.overview import overview_page
from graphkit.views.pages.page import Page
from graphkit.views.pages.recording import recording_page
from graphkit.views.selection import select_graphs


def first_page(record: RecordWithGraphs) -> Page:
    """Return the page of the whole record; of a graph, its own page and where it was made."""
    if isinstance(record, CaptureRecord):
        return overview_page(record)
    if isinstance(record, GraphRecord):
        page = graph_page(graph_groups(record)[0], 0)
        return replace(page, facts=(*page.facts, *environment_facts(record)))
    return recording_page(record)


def initial_pages(
    record: RecordWithGraphs, *, mode: str | None = None, batch_size: int | None = None
) -> tuple[Page, ...]:
    """Return the page of the whole record, followed by the selected graph's.

    Args:
        record: A capture, a recording or a graph.
        mode: Selects the first graph of this mode, or the graph of this name.
        batch_size: Selects the first graph of this size.

    Raises:
        ConfigError: The record has no such mode or size.
    """
    selected = select_graphs(record, mode=mode, batch_size=batch_size)
    first = first_page(record)
    is_whole = mode is None and batch_size is None
    if isinstance(record, GraphRecord) or is_whole or not selected:
        return (first,)
    name = selected[0][0]
    return (first, *(
        graph_page(group, index)
        for group in graph_groups(record)
        for index, (other, _) in enumerate(group.graphs)
        if other == name
    ))  # fmt: skip
