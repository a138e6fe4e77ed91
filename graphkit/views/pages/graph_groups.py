"""Groups of graphs that Tab steps through, with the links between the pages of a graph."""

from __future__ import annotations

from functools import partial

from graphkit.records import CaptureRecord, RecordWithGraphs
from graphkit.views.pages.comparison import comparison_link
from graphkit.views.pages.kernels import kernels_page
from graphkit.views.pages.memory import buffers_link, memory_link
from graphkit.views.pages.page_model import GraphGroup
from graphkit.views.pages.timeline import timeline_page
from graphkit.views.selection import NamedGraph, named_graphs

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
