"""What a record holds as a whole, as text: where it was made, its sizes, its input buffers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from graphkit.records import (
    BufferRecord,
    ModeRecord,
    RecordingRecord,
    RecordWithGraphs,
    SizeRecord,
    backend_of,
    title_of,
)
from graphkit.views.figures import count_of, extent, facts, plain, table, us

_KINDS = {"capture": "target", "recording": "command", "graph": "graph"}


def header(record: RecordWithGraphs) -> RenderableType:
    """What it is of, and where it was made."""
    return facts([(name, plain(text)) for name, text in _header(record) if text])


def _header(record: RecordWithGraphs) -> Iterator[tuple[str, str]]:
    where = record.environment
    yield _KINDS[record.KIND], title_of(record)
    yield "backend", backend_of(record)
    yield "device", where.device
    for name in ("torch", "triton", "cuda", "driver", "graphkit"):
        yield name, getattr(where, name)
    if isinstance(record, RecordingRecord):
        yield "exit code", str(record.exit_code)
        for process in record.processes:
            yield f"process {process.pid}", " ".join(process.command)


def sizes_table(modes: Sequence[ModeRecord], batch_size: int | None) -> Table:
    """Modes by sizes: nodes, memory, times, and how often each was replayed."""
    figures = ("size", "nodes", "pool KiB", "capture ms", "replay us", "replays")
    made = table(["mode"], figures, "modes and sizes")
    for mode in modes:
        for size in mode.sizes:
            if batch_size in (None, size.batch_size):
                made.add_row(Text(plain(mode.mode)), *_figures(mode, size))
    return made


def _figures(mode: ModeRecord, size: SizeRecord) -> Iterator[str]:
    yield f"{size.batch_size}"
    yield f"{size.num_nodes:,}"
    yield f"{size.pool_bytes / 1024:,.0f}"
    yield f"{size.capture_ms:,.1f}"
    yield us(size.replay_us)
    yield f"{mode.stats.replays_by_size.get(size.batch_size, 0):,}" if mode.stats else "-"


def mode_lines(mode: ModeRecord) -> Iterator[Text]:
    """What ran without a graph and why, and the rows that were computed for nobody."""
    if mode.eager_reason:
        yield Text(plain(f"{mode.mode} stays eager: {mode.eager_reason}"), style="yellow")
    if mode.stats is None:
        return
    yield Text(plain(f"{mode.mode}: {mode.stats.padded_rows:,} padded rows"))
    for reason, count in mode.stats.fallbacks.items():
        yield Text(plain(f"{mode.mode} fell back {count:,} x: {reason}"), style="yellow")


def buffers(mode: ModeRecord, all_modes: Sequence[ModeRecord]) -> Iterator[RenderableType]:
    """The mode's input fields, and which other modes' fields lie on the same bytes."""
    title = f"{plain(mode.mode)} inputs, {count_of(mode.tokens_per_request, 'token')} per request"
    made = table(("field", "dtype", "shape", "axis"), ("pad", "bytes", "address"), title)
    for buffer in mode.buffers:
        made.add_row(*_cells(buffer))
    yield made
    yield from (Text(plain(line)) for line in _sharing(mode, all_modes))


def sharing(
    buffer: BufferRecord, mode: ModeRecord, modes: Sequence[ModeRecord]
) -> Iterator[tuple[str, str]]:
    """The fields of other modes that lie on bytes of this mode's buffer: mode and field."""
    end = buffer.address + buffer.size
    for other in modes:
        for each in other.buffers if other is not mode else ():
            if buffer.address < each.address + each.size and each.address < end:
                yield other.mode, each.field


def _cells(buffer: BufferRecord) -> Iterator[RenderableType]:
    yield Text(plain(buffer.field))
    yield Text(plain(buffer.dtype))
    yield extent(buffer.shape)
    yield Text(plain(buffer.axis))
    yield f"{buffer.pad:g}"
    yield f"{buffer.size:,}"
    yield f"{buffer.address:#x}"


def _sharing(mode: ModeRecord, all_modes: Sequence[ModeRecord]) -> Iterator[str]:
    for buffer in mode.buffers:
        others = [".".join(place) for place in sharing(buffer, mode, all_modes)]
        if others:
            yield f"{buffer.field} shares its memory with {', '.join(others)}"
        if buffer.is_bound:
            yield f"{buffer.field} is written in place by another graph"
