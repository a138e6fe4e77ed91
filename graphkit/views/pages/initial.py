"""Graphs of a record in groups that Tab steps through, and the pages that it opens with."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from graphkit.records import CaptureRecord, GraphRecord, RecordWithGraphs
from graphkit.views.formatting import environment_facts
from graphkit.views.pages.comparison import comparison_link
from graphkit.views.pages.graph import graph_page
from graphkit.views.pages.kernels import kernels_page
from graphkit.views.pages.memory import buffers_link, memory_link
from graphkit.views.pages.overview import foreign_page, overview_page
from graphkit.views.pages.page_model import GraphGroup, Page
from graphkit.views.pages.timeline import timeline_page
from graphkit.views.selection import NamedGraph, named_graphs, select_graphs

PAGES_BY = {"module": graph_page, "kernel": kernels_page, "time": timeline_page}
"""Pages of the nodes of a graph by their order: in modules, by kernel, or as they ran."""


_LINKS = {
    "kernels": lambda group, index: partial(kernels_page, group, index),
    "time": lambda group, index: partial(timeline_page, group, index),
    "compare": comparison_link,
    "memory": memory_link,
    "buffers": lambda group, index: buffers_link(group.modes, group.graphs[index][1].mode),
}


def graph_groups(record: RecordWithGraphs) -> tuple[GraphGroup, ...]:
    """Group the graphs of a capture by mode, and those of a foreign program by process."""
    is_capture = isinstance(record, CaptureRecord)
    groups: dict[str | int, list[NamedGraph]] = {}
    for name, graph in named_graphs(record):
        groups.setdefault(graph.mode if is_capture else graph.process, []).append((name, graph))
    modes = record.modes if isinstance(record, CaptureRecord) else ()
    return tuple(GraphGroup(tuple(graphs), modes, _LINKS) for graphs in groups.values())


def first_page(record: RecordWithGraphs) -> Page:
    """Return the page of the whole record; of a graph, its own page and where it was made."""
    groups = graph_groups(record)
    if isinstance(record, CaptureRecord):
        return overview_page(record, groups)
    if isinstance(record, GraphRecord):
        page = graph_page(groups[0], 0)
        return replace(page, facts=(*page.facts, *environment_facts(record)))
    return foreign_page(record, groups)


def initial_pages(
    record: RecordWithGraphs,
    *,
    mode: str | None = None,
    batch_size: int | None = None,
    by: str = "module",
) -> tuple[Page, ...]:
    """Return the page of the whole record, followed by that of the first selected graph.

    Mode and size select it as in ``select_graphs``; ``by``, a key of ``PAGES_BY``, says how to show
    it, or the first graph.

    Raises:
        ConfigError: The record has no such mode or size.
    """
    selected = select_graphs(record, mode=mode, batch_size=batch_size)
    pages = [first_page(record)]
    is_whole = mode is None and batch_size is None
    if not selected or (is_whole and by == "module"):
        return tuple(pages)
    group = next(group for group in graph_groups(record) if selected[0] in group.graphs)
    index = group.graphs.index(selected[0])
    if not isinstance(record, GraphRecord):
        pages.append(graph_page(group, index))
    if by != "module":
        pages.append(PAGES_BY[by](group, index))
    return tuple(pages)
