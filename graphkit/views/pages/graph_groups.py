"""Groups of graphs that Tab steps through."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from graphkit.records import CaptureRecord, ModeRecord, RecordWithGraphs
from graphkit.views.pages.buffers import buffers_link
from graphkit.views.pages.comparison import comparison_link
from graphkit.views.pages.kernels import kernels_page
from graphkit.views.pages.memory import memory_link
from graphkit.views.pages.page_model import Link
from graphkit.views.pages.timeline import timeline_page
from graphkit.views.selection import NamedGraph, named_graphs


@dataclass(frozen=True, slots=True)
class GraphGroup:
    """The graphs of one mode, or of one process.

    Attributes:
        graphs: The graphs with their names, in the record's order.
        modes: All modes of the record.
    """

    graphs: tuple[NamedGraph, ...]
    modes: tuple[ModeRecord, ...] = ()

    def links(self, index: int) -> dict[str, Link]:
        """Return the links to the pages of a graph; each of these pages has them, too."""
        return {
            "kernels": partial(kernels_page, self.graphs, index, self.links),
            "time": partial(timeline_page, self.graphs, index, self.links),
            "compare": comparison_link(self.graphs, index, self.links),
            "memory": memory_link(self.graphs, index, self.links),
            "buffers": buffers_link(self.modes, self.graphs[index][1].mode),
        }


def graph_groups(record: RecordWithGraphs) -> tuple[GraphGroup, ...]:
    """Group the graphs of a capture by mode, and those of a foreign program by process."""
    is_capture = isinstance(record, CaptureRecord)
    groups: dict[str | int, list[NamedGraph]] = {}
    for name, graph in named_graphs(record):
        groups.setdefault(graph.mode if is_capture else graph.process, []).append((name, graph))
    modes = record.modes if isinstance(record, CaptureRecord) else ()
    return tuple(GraphGroup(tuple(graphs), modes) for graphs in groups.values())
