"""A record with graphs as text: everything in it that people look for, once."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from graphkit.records import CaptureRecord, RecordWithGraphs
from graphkit.views.graph import graph_view
from graphkit.views.node import node_view
from graphkit.views.overview import buffers, header, mode_lines, sizes_table
from graphkit.views.selection import is_mode, selected

__all__ = ["inspect_view", "node_view"]


def inspect_view(
    record: RecordWithGraphs, *, mode: str | None = None, batch_size: int | None = None
) -> RenderableType:
    """Where it was made, its modes, sizes and buffers, and each graph with all its nodes.

    Args:
        record: A capture, a recording or a graph.
        mode: Shows this forward mode alone, or the graph of this name.
        batch_size: Shows this captured size alone.

    Raises:
        ConfigError: The record has no such mode or size.
    """
    graphs = selected(record, mode=mode, batch_size=batch_size)
    parts = [header(record)]
    if isinstance(record, CaptureRecord):
        parts += _modes(record, mode, batch_size)
    for title, graph in graphs:
        parts += ["", graph_view(graph, title)]
    if not graphs:
        parts += ["", Text("No nodes: the record was made without looking into graphs.")]
    return Group(*parts)


def _modes(
    record: CaptureRecord, mode: str | None, batch_size: int | None
) -> Iterator[RenderableType]:
    modes = [each for each in record.modes if is_mode(mode, each.mode)]
    yield ""
    yield sizes_table(modes, batch_size)
    for each in modes:
        yield from mode_lines(each)
    for each in modes:
        if each.buffers:
            yield ""
            yield from buffers(each, record.modes)
