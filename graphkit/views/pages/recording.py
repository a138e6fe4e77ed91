"""The first view of a recording: graphs by process and by the line that captured them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from graphkit.records import RecordingRecord
from graphkit.views.figures import count_of, size, us
from graphkit.views.pages.compare import compare_link
from graphkit.views.pages.family import Family, families
from graphkit.views.pages.graph import graph_page
from graphkit.views.pages.memory import memory_link
from graphkit.views.pages.page import Column, Item, Page

_COLUMNS = (
    Column(name="process, line and graph", least=24),
    Column(name="graphs", show="{:,}".format, is_number=True, rank=2),
    Column(name="nodes", show="{:,}".format, is_number=True),
    Column(name="bytes", show=size, is_number=True, rank=1),
    Column(name="replay us", show=us, is_number=True, rank=3),
)
_UNKNOWN = "at an unknown line"


def recording_page(record: RecordingRecord) -> Page:
    """Everything that a program captured, the lines that captured it open."""
    items = tuple(_process(record, family) for family in families(record))
    lines = (line for item in items for line in item.children)
    return Page(
        title=" ".join(record.command),
        facts=(
            count_of(len(record.graphs), "graph"), f"exit code {record.exit_code}",
            record.environment.device, f"torch {record.environment.torch}",
        ),
        columns=_COLUMNS,
        items=items,
        opened=frozenset(item.key for item in (*items, *lines)),
        empty="the program captured no graph",
    )  # fmt: skip


def _process(record: RecordingRecord, family: Family) -> Item:
    number = family.graphs[0][1].process
    known = dict(enumerate(record.processes)).get(number)
    command = " ".join(known.command) if known else ""
    name = f"process {known.pid}: {command}" if known else f"process #{number}"
    return _group(f"process {number}", name, tuple(_lines(family)))


def _lines(family: Family) -> Iterator[Item]:
    """Graphs by the line that captured them, in the order in which the lines came first."""
    together: dict[str, list[Item]] = {}
    for at, (_, graph) in enumerate(family.graphs):
        together.setdefault(graph.captured_at, []).append(_graph(family, at))
    for line, graphs in together.items():
        process = family.graphs[0][1].process
        yield _group(f"process {process} {line}", line or _UNKNOWN, tuple(graphs))


def _group(key: str, name: str, inside: tuple[Item, ...]) -> Item:
    graphs, nodes, num_bytes = (sum(item.values[at] or 0 for item in inside) for at in (1, 2, 3))
    return Item(
        key=key, values=(name, graphs, nodes, num_bytes, None), note=name, inside=lambda: inside
    )


def _graph(family: Family, at: int) -> Item:
    title, graph = family.graphs[at]
    return Item(
        key=title,
        values=(
            title, 1, len(graph.nodes), graph.memory.graph_bytes if graph.memory else None,
            graph.timing.p50_us if graph.timing else None,
        ),
        note=title,
        links={
            "open": partial(graph_page, family, at),
            "compare": compare_link(family.graphs, at),
            "memory": memory_link(family.graphs, at),
        },
    )  # fmt: skip
