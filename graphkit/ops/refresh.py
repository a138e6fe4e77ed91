"""The refresh: first node of every captured graph.

It reads the next mailbox entry, copies every field's live rows into place, writes the pad value
into the tail, and publishes that the entry was consumed. Layout: ``mailbox_layout``.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence

import torch

from graphkit.ops.mailbox_layout import FROM_PAYLOAD, KEEP, RING_WORDS, Column, Header, Ring
from graphkit.ops.registration import register_op


@register_op(mutates_args=("segments", "mailbox", "state", "entry"))
def refresh(
    segments: Sequence[torch.Tensor],
    mailbox: torch.Tensor,
    state: torch.Tensor,
    table: torch.Tensor,
    entry: torch.Tensor,  # noqa: ARG001 - for the CUDA kernels, like the next two
    fetches: torch.Tensor,  # noqa: ARG001
    copies: torch.Tensor,  # noqa: ARG001
    entries: int,
    batch_size: int,
    num_tokens: int,
) -> None:
    """Fill the first ``batch_size`` requests and ``num_tokens`` tokens of every segment.

    Two launches. Allocates nothing on the device. Arguments are not checked.

    Args:
        segments: Each segment's rows at full capacity, [capacity, ...] of any dtype, contiguous.
        mailbox: The ring, [RING_WORDS + entries * words] int64; pinned if the device is CUDA.
        state: The next sequence number, [1] int64, on the device.
        table: One row of ``Column`` per segment, [len(segments), len(Column)] int64, on the device.
        entry: The device's copy of the entry, [words] int64.
        fetches: (first byte, bytes) of the parts of the entry that this size needs, [programs, 2]
            int32, on the device.
        copies: (segment, chunk) for everything that this size fills, [programs, 2] int32, on the
            device.
        entries: Entries in the ring.
        batch_size: Captured requests.
        num_tokens: Captured tokens.
    """
    sequence = int(state)
    posted = mailbox[RING_WORDS:].view(entries, -1)[sequence % entries]
    header = posted[: Header.SOURCES + len(segments)].tolist()
    padded = {Header.REQUESTS: batch_size, Header.TOKENS: num_tokens, Header.HAS_ROWS: 1}
    for i, (rows, columns) in enumerate(zip(segments, table.tolist(), strict=True)):
        live, source = header[columns[Column.AXIS]], header[Header.SOURCES + i]
        end = padded[Header(columns[Column.AXIS])] * columns[Column.ROW_BYTES]
        size = min(live * columns[Column.ROW_BYTES], end)  # the entry may be another replay's
        assert 0 <= size <= end <= rows.nbytes, "a segment holds every captured size"
        if source != KEEP and size:
            payload = posted.data_ptr() + columns[Column.PAYLOAD]
            ctypes.memmove(rows.data_ptr(), payload if source == FROM_PAYLOAD else source, size)
        if size < end:
            pads = columns[Column.PAD].to_bytes(8, sys.byteorder, signed=True) * (end // 8 + 1)
            ctypes.memmove(rows.data_ptr() + size, pads[size:end], end - size)
    if int(posted[Header.SEQUENCE]) != sequence:
        mailbox[Ring.FAULT] = sequence + 1
    state.fill_(sequence + 1)
    mailbox[Ring.CONSUMED] = sequence + 1
