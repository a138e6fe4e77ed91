"""A CaptureRecord as people see it."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from graphkit.records import CaptureRecord, Mismatch, ModeRecord, SizeRecord

_SHOWN = 10


def capture_view(record: CaptureRecord) -> RenderableType:
    """One table per mode, what the columns were measured on, and the verdict."""
    return Group(*_parts(record))


def _parts(record: CaptureRecord) -> Iterator[RenderableType]:
    facts = record.environment
    yield Text(
        f"{record.target} on {facts.device}, {record.backend} backend, torch {facts.torch}"
        + (
            f", CUDA {facts.cuda}, driver {facts.driver}"
            if facts.cuda and facts.device != "cpu"
            else ""
        )
    )
    for mode in record.modes:
        yield _mode_table(record, mode)
        if mode.eager_reason:
            yield Text(f"stays eager: {mode.eager_reason}", style="yellow")
    yield from _verdict(record)


def _mode_table(record: CaptureRecord, mode: ModeRecord) -> Table:
    table = Table(
        title=f"{mode.mode}, {mode.tokens_per_request} tokens per request",
        title_justify="left",
        title_style="bold",
    )
    nodes = "nodes" if record.backend == "cuda" else "ops"
    for name in ("size", nodes, "capture ms", "pool KiB", "replay us", "eager us"):
        table.add_column(name, justify="right")
    table.add_column("eager / replay", justify="right")
    table.add_column("largest difference", justify="right")
    for size in mode.sizes:
        table.add_row(*_cells(size))
    return table


def _cells(size: SizeRecord) -> Iterator[str]:
    yield str(size.batch_size)
    yield str(size.num_nodes)
    yield f"{size.capture_ms:.1f}"
    yield f"{size.pool_bytes / 1024:,.0f}"
    yield _number(size.replay_us, ",.0f")
    yield _number(size.eager_us, ",.0f")
    both = size.replay_us and size.eager_us
    yield f"{size.eager_us / size.replay_us:.1f}x" if both else "-"  # type: ignore[operator]
    yield _number(size.largest_difference, ".2g")


def _verdict(record: CaptureRecord) -> Iterator[Text]:
    compared = sum(size.batches_compared for size in record.sizes)
    if not record.sizes:
        yield Text("No graph was captured: every batch falls back.", style="yellow")
        return
    if not record.mismatches:
        yield Text(
            f"{compared} live batches replayed: each equals the padded path without a graph bit by "
            "bit, and eager within rounding.",
            style="green",
        )
        return
    wrong = {(m.mode, m.batch_size, m.padded_batch_size) for m in record.mismatches}
    yield Text(f"{len(wrong)} of {compared} replays are wrong:", style="bold red")
    for mismatch in record.mismatches[:_SHOWN]:
        yield Text(f"  {_sentence(mismatch)}", style="red")
    if len(record.mismatches) > _SHOWN:
        yield Text(f"  and {len(record.mismatches) - _SHOWN} more; --json lists all", style="red")


def _sentence(m: Mismatch) -> str:
    return (
        f"{m.mode}, {m.batch_size} requests at size {m.padded_batch_size}: {m.kind}: {m.field} row "
        f"{m.row} (request {m.request}) is {m.got:.6g} instead of {m.expected:.6g}"
    )


def _number(value: float | None, how: str) -> str:
    return "-" if value is None else format(value, how)
