"""Page of a mode's input buffers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from graphkit.records import BufferRecord, ModeRecord, extent
from graphkit.views.formatting import size
from graphkit.views.pages.page_model import Column, Link, Page, Row, Siblings, count_column

_COLUMNS = (
    Column(name="field"),
    Column(name="dtype", rank=1, most=12),
    Column(name="shape", show=extent, rank=6),
    Column(name="axis", rank=2, most=8),
    count_column("pad", 4, "{:g}".format),
    Column(name="address", show="{:#x}".format, rank=3),
    count_column("size", 5, size),
    Column(name="shared by", least=16),
)


def buffers_link(modes: Sequence[ModeRecord], name: str) -> Link:
    """Return the link to the buffers of a mode."""
    index = next((index for index, mode in enumerate(modes) if mode.mode == name), None)
    if index is None:
        return "the record has no input buffers of this graph"
    return partial(buffers_page, modes, index)


def buffers_page(modes: Sequence[ModeRecord], index: int) -> Page:
    """Return the buffers of one of the modes, in the order of their declaration."""
    mode = modes[index]
    return Page(
        title=f"buffers of {mode.mode}",
        facts=(
            ("tokens per request", f"{mode.tokens_per_request}"),
            ("all inputs", size(mode.input_bytes)),
        ),
        columns=_COLUMNS,
        rows=tuple(_row(buffer, mode, modes) for buffer in mode.buffers),
        siblings=Siblings(count=len(modes), index=index, make=partial(buffers_page, modes)),
        empty="the record has no buffers of this mode",
    )


def _row(buffer: BufferRecord, mode: ModeRecord, modes: Sequence[ModeRecord]) -> Row:
    shared = ", ".join(_shared_by(buffer, mode, modes))
    return Row(
        key=buffer.field,
        values=(
            buffer.field, buffer.dtype, buffer.shape, buffer.axis, buffer.pad, buffer.address,
            buffer.size, shared,
        ),
        note=f"{buffer.meaning}; {buffer.dtype} {extent(buffer.shape)}, {size(buffer.size)} at "
        f"{buffer.address:#x}" + (f"; shared by {shared}" if shared else ""),
    )  # fmt: skip


def _shared_by(
    buffer: BufferRecord, mode: ModeRecord, modes: Sequence[ModeRecord]
) -> Iterator[str]:
    """Yield the fields of other modes that overlap the buffer in memory."""
    if buffer.is_bound:
        yield "bound: another graph writes it"
    end = buffer.address + buffer.size
    for other in modes:
        for shared in other.buffers if other is not mode else ():
            if buffer.address < shared.address + shared.size and shared.address < end:
                yield other.mode if shared.field == buffer.field else f"{other.mode}.{shared.field}"
