"""Page of a recorded program: its graphs by process and by the line that captured them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from graphkit.records import ForeignRecord
from graphkit.views.facts import environment_facts
from graphkit.views.formatting import size
from graphkit.views.pages.graph import graph_page
from graphkit.views.pages.graph_groups import graph_groups
from graphkit.views.pages.page_model import Column, GraphGroup, Page, Row, count_column, section

_COLUMNS = (
    Column(name="process, line and graph", least=24),
    count_column("graphs", 2),
    count_column("nodes", 0),
    count_column("memory", 1, size),
)


def foreign_page(record: ForeignRecord) -> Page:
    """Return everything that a program captured, with processes and lines open."""
    rows = tuple(_process_row(record, group) for group in graph_groups(record))
    lines = (line for row in rows for line in row.children)
    return Page(
        title=" ".join(record.command),
        facts=(
            ("graphs", f"{len(record.graphs):,}"),
            ("exit code", f"{record.exit_code}"),
            *environment_facts(record),
        ),
        columns=_COLUMNS,
        rows=rows,
        opened=frozenset(row.key for row in (*rows, *lines)),
        empty="the program captured no graph",
    )


def _process_row(record: ForeignRecord, group: GraphGroup) -> Row:
    number = group.graphs[0][1].process
    known = dict(enumerate(record.processes)).get(number)
    name = f"process {known.pid}: {' '.join(known.command)}" if known else f"process #{number}"
    return _sum_row(f"process {number}", name, tuple(_line_rows(group)))


def _line_rows(group: GraphGroup) -> Iterator[Row]:
    """Yield the lines that captured graphs, in the order of their first graphs."""
    by_line: dict[str, list[Row]] = {}
    for index, (_, graph) in enumerate(group.graphs):
        by_line.setdefault(graph.captured_at, []).append(_graph_row(group, index))
    for line, graphs in by_line.items():
        process = group.graphs[0][1].process
        yield _sum_row(f"process {process} {line}", line or "unknown line", tuple(graphs))


def _sum_row(key: str, name: str, rows: tuple[Row, ...]) -> Row:
    graphs, nodes, num_bytes = (sum(row.values[at] or 0 for row in rows) for at in (1, 2, 3))
    return section(key, (name, graphs, nodes, num_bytes), rows, note=name)


def _graph_row(group: GraphGroup, index: int) -> Row:
    title, graph = group.graphs[index]
    return Row(
        key=title,
        values=(
            title, 1, len(graph.nodes), graph.memory.graph_bytes if graph.memory else None,
        ),
        note=title,
        links={"open": partial(graph_page, group, index), **group.links(index)},
    )  # fmt: skip
