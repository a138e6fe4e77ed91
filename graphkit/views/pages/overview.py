"""Pages of whole records: modes and sizes of a capture, processes and lines of a program."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from graphkit.records import (
    CaptureRecord,
    ForeignRecord,
    LoopBody,
    LoopRecord,
    ModeRecord,
    SizeRecord,
    count_of,
    figure_heading,
)
from graphkit.views.formatting import environment_facts, size, us
from graphkit.views.pages.graph import graph_page
from graphkit.views.pages.memory import buffers_link
from graphkit.views.pages.page_model import (
    Column,
    GraphGroup,
    Link,
    Page,
    Row,
    count_column,
    section,
)

_NO_GRAPHS = (
    "the record holds no nodes: the capture was not inspected. Run graphkit inspect TARGET."
)

_PROGRAM_COLUMNS = (
    Column(name="process, line and graph", least=24),
    count_column("graphs", 2),
    count_column("nodes", 0),
    count_column("memory", 1, size),
)


def overview_page(record: CaptureRecord, groups: Sequence[GraphGroup] = ()) -> Page:
    """Return each mode with its sizes: their contents, costs, and replays, with links to graphs."""
    return Page(
        title=record.target,
        facts=tuple(_facts(record)),
        columns=_columns(record),
        rows=tuple(_mode_row(mode, record, groups) for mode in record.modes),
        notes=tuple(f"{mode.mode} {remark}" for mode in record.modes for remark in _remarks(mode)),
        opened=frozenset(mode.mode for mode in record.modes),
        empty="no mode was captured",
    )


def _facts(record: CaptureRecord) -> Iterator[tuple[str, str]]:
    if record.mismatches:
        rows = count_of(len(record.mismatches), "row")
        yield "wrong replays", f"{rows}; graphkit capture lists them"
    yield from environment_facts(record)


def _columns(record: CaptureRecord) -> tuple[Column, ...]:
    return (
        Column(name="mode and size", least=24),
        count_column("nodes" if record.backend == "cuda" else "ops", 2),
        count_column("pool", 3, size),
        count_column(figure_heading("capture_ms"), 6, "{:,.1f}".format),
        count_column(figure_heading("replay_us"), 1, us),
        count_column(figure_heading("eager_us"), 8, us),
        count_column("difference", 9, "{:.2g}".format),
        count_column("replays", 5),
        count_column("padded rows", 7),
        count_column("fallbacks", 4),
    )


def _mode_row(mode: ModeRecord, record: CaptureRecord, groups: Sequence[GraphGroup]) -> Row:
    stats = mode.stats
    fallbacks = sum(stats.fallbacks.values()) if stats else None
    return Row(
        key=mode.mode,
        values=(
            mode.mode, None, mode.graph_bytes,
            sum(captured.capture_ms for captured in mode.sizes), None, None, None,
            stats.replays if stats else None, stats.padded_rows if stats else None, fallbacks,
        ),
        note="; ".join(_remarks(mode)),
        tone="warning" if mode.eager_reason or fallbacks else "",
        make_children=partial(_rows, mode, record, groups) if mode.sizes else None,
        links={"buffers": buffers_link(record.modes, mode.mode)},
    )  # fmt: skip


def _remarks(mode: ModeRecord) -> Iterator[str]:
    """Yield what the columns do not say about a mode, as sentences without their subject."""
    if mode.eager_reason:
        yield f"stays eager: {mode.eager_reason}"
    if mode.stats is None:
        yield "has no counts of replays"
        return
    yield f"computed {count_of(mode.stats.padded_rows, 'padded row')}"
    for drafts, count in mode.stats.drafted_lengths.items():
        yield f"ran {count_of(count, 'step')} of {count_of(drafts, 'draft')}"
    for reason, count in mode.stats.fallbacks.items():
        yield f"fell back {count_of(count, 'time')}: {reason}"


def _loop_row(loop: LoopRecord, key: str) -> Row:
    """Return the composition of a loop, as rows inside of rows."""

    def row(
        name: str,
        nodes: int | None,
        children: Sequence[Row] = (),
        note: str = "",
        time_us: float | None = None,
    ) -> Row:
        values = name, nodes, None, None, time_us, None, None, None, None, None
        return section(f"{key} {name}", values, children, note=note)

    size, has_switch = sum(body.num_nodes for body in loop.bodies), len(loop.bodies) > 1
    bodies = [
        row(f"{f'{at}: ' * has_switch}{_body_name(body)}", body.num_nodes, time_us=body.replay_us)
        for at, body in enumerate(loop.bodies)
    ]
    is_adaptive = any(body.drafts is not None for body in loop.bodies)
    switch = "SWITCH size and drafts" if is_adaptive else "SWITCH size"
    inside = [row(switch, size, bodies)] if has_switch else bodies
    parts = row("prologue", loop.prologue_nodes), row("WHILE again", size, inside)
    compared = f"{count_of(loop.steps_compared, 'step')} compared with single replays"
    return row(f"{loop.kind} loop", loop.prologue_nodes + size, parts, compared)


def _rows(mode: ModeRecord, record: CaptureRecord, groups: Sequence[GraphGroup]) -> Iterator[Row]:
    """Yield the sizes of a mode, and below them its loops."""
    for captured in mode.sizes:
        replays = mode.stats.replays_by_size.get(captured.batch_size, 0) if mode.stats else None
        yield Row(
            key=f"{mode.mode} {captured.batch_size}",
            values=(
                f"size {captured.batch_size}", captured.num_nodes, captured.pool_bytes,
                captured.capture_ms, captured.replay_us, captured.eager_us,
                captured.largest_difference, replays, None, None,
            ),
            note=f"{mode.mode} {'; '.join((_checked(captured), *_remarks(mode)))}",
            links=_links(record, mode, captured, groups),
        )  # fmt: skip
    for loop in mode.loops:
        yield _loop_row(loop, f"{mode.mode} {loop.kind} loop")


def _checked(captured: SizeRecord) -> str:
    size = f"size {captured.batch_size}, {count_of(captured.num_tokens, 'row')}"
    if captured.largest_difference is None:
        return size
    batches = count_of(captured.batches_compared, "batch")
    return f"{size}, largest difference from eager of {batches} {captured.largest_difference:.2g}"


def _links(
    record: CaptureRecord, mode: ModeRecord, captured: SizeRecord, groups: Sequence[GraphGroup]
) -> dict[str, Link]:
    links: dict[str, Link] = dict.fromkeys(("open", "compare", "memory"), _NO_GRAPHS)
    links["buffers"] = buffers_link(record.modes, mode.mode)
    for group in groups:
        for index, (_, graph) in enumerate(group.graphs):
            if (graph.mode, graph.batch_size) == (mode.mode, captured.batch_size):
                links = {"open": partial(graph_page, group, index), **group.links(index)}
    return links


def _body_name(body: LoopBody) -> str:
    """Return the name of a loop's body: its size and, of several, its draft length."""
    name = f"body of size {body.batch_size}"
    if body.drafts is None:
        return name
    drafts = "catch-up" if body.catches_up else count_of(body.drafts, "draft")
    if body.rows is not None and body.rows < body.batch_size * (body.drafts + 1):
        drafts += f", {count_of(body.rows, 'row')}"
    return f"{name}, {drafts}"


def foreign_page(record: ForeignRecord, groups: Sequence[GraphGroup]) -> Page:
    """Return everything that a program captured, with processes and lines open."""
    rows = tuple(_process_row(record, group) for group in groups)
    lines = (line for row in rows for line in row.children)
    return Page(
        title=" ".join(record.command),
        facts=(
            ("graphs", f"{len(record.graphs):,}"),
            ("exit code", f"{record.exit_code}"),
            *environment_facts(record),
        ),
        columns=_PROGRAM_COLUMNS,
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
