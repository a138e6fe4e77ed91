"""The view that a record opens with."""

from __future__ import annotations

from graphkit.records import CaptureRecord, GraphRecord, RecordWithGraphs
from graphkit.views.pages.family import families
from graphkit.views.pages.graph import graph_page
from graphkit.views.pages.overview import overview
from graphkit.views.pages.page import Page
from graphkit.views.pages.recording import recording_page
from graphkit.views.selection import selected


def first_pages(
    record: RecordWithGraphs, *, mode: str | None = None, batch_size: int | None = None
) -> tuple[Page, ...]:
    """The whole record, and then the graph that was asked for.

    Args:
        record: A single graph is a view by itself.
        mode: Opens the first graph of this mode, or the graph of this name.
        batch_size: Opens the graph of this size.

    Raises:
        ConfigError: The record has no such mode or size.
    """
    found = selected(record, mode=mode, batch_size=batch_size)
    if isinstance(record, GraphRecord):
        return (graph_page(families(record)[0], 0),)
    first = overview(record) if isinstance(record, CaptureRecord) else recording_page(record)
    if mode is None and batch_size is None:
        return (first,)
    places = [(family, at) for family in families(record) for at in range(len(family.graphs))]
    return (first, *(graph_page(f, at) for f, at in places if f.graphs[at] in found[:1]))
