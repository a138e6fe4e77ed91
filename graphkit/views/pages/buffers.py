"""The view of a mode's input buffers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from graphkit.records import BufferRecord, ModeRecord
from graphkit.views.figures import count_of, size
from graphkit.views.overview import sharing
from graphkit.views.pages.page import Beside, Column, Item, Link, Page

_COLUMNS = (
    Column(name="field"),
    Column(name="dtype", rank=1, most=12),
    Column(name="axis", rank=2, most=8),
    Column(name="pad", show="{:g}".format, is_number=True, rank=4),
    Column(name="address", show="{:#x}".format, rank=3),
    Column(name="size", show=size, is_number=True, rank=5),
    Column(name="shared by", least=16),
)


def buffers_link(modes: Sequence[ModeRecord], name: str) -> Link:
    """The way to the buffers of the mode of that name."""
    at = next((at for at, mode in enumerate(modes) if mode.mode == name), None)
    if at is None:
        return "the record tells nothing of this graph's input buffers"
    return partial(buffers_page, modes, at)


def buffers_page(modes: Sequence[ModeRecord], at: int) -> Page:
    """The fields in the order of their declaration; Tab goes to the next mode's."""
    mode = modes[at]
    return Page(
        title=f"buffers of {mode.mode}",
        facts=(
            f"{count_of(mode.tokens_per_request, 'token')} per request",
            f"{size(mode.input_bytes)} for all inputs",
        ),
        columns=_COLUMNS,
        items=tuple(_item(buffer, mode, modes) for buffer in mode.buffers),
        beside=Beside(count=len(modes), at=at, make=partial(buffers_page, modes)),
        empty="the record tells of no buffers",
    )


def _item(buffer: BufferRecord, mode: ModeRecord, modes: Sequence[ModeRecord]) -> Item:
    shared = ", ".join(_sharing(buffer, mode, modes))
    shape = " x ".join(map(str, buffer.shape))
    return Item(
        key=buffer.field,
        values=(
            buffer.field, buffer.dtype, buffer.axis, buffer.pad, buffer.address, buffer.size, shared
        ),
        note=f"{buffer.meaning}; {buffer.dtype} {shape}, {size(buffer.size)} at {buffer.address:#x}"
        + (f"; shared by {shared}" if shared else ""),
    )  # fmt: skip


def _sharing(buffer: BufferRecord, mode: ModeRecord, modes: Sequence[ModeRecord]) -> Iterator[str]:
    if buffer.is_bound:
        yield "bound: another graph writes it"
    for other, field in sharing(buffer, mode, modes):
        yield other if field == buffer.field else f"{other}.{field}"
