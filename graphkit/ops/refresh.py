"""The refresh: first node of every captured graph, and the layout of what it reads.

It reads the next mailbox entry, copies every field's live rows into place, writes the pad value
into the tail, and publishes that the entry was consumed. The mailbox is one int64 tensor in memory
that host and device both access::

    [ consumed, fault, 6 unused | entry 0 | entry 1 | ... ]
    entry = [ sequence, requests, tokens, 1 | one source per segment | payload bytes ]

A *segment* is a contiguous run of rows. A field has one, unless a dimension precedes its rows:
mrope_positions [3, T] has three. A segment's source word is ``FROM_PAYLOAD``, ``KEEP``, or an
address that the device can read the live rows from.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from enum import IntEnum

import torch

from graphkit.ops.registration import register_op

RING_WORDS = 8
"""Words before entry 0: one cache line, so that polling does not load an entry."""
CHUNK_BYTES = 4096
"""Bytes that one program of a CUDA kernel copies."""
FROM_PAYLOAD = 0
"""Source word: the rows are in the entry."""
KEEP = -1
"""Source word: an earlier graph has already written the rows in place."""


class Ring(IntEnum):
    """Words at the head of the mailbox."""

    CONSUMED = 0
    FAULT = 1


class Header(IntEnum):
    """Words at the head of an entry. The middle three count live rows, one per axis."""

    SEQUENCE = 0
    REQUESTS = 1
    TOKENS = 2
    HAS_ROWS = 3
    SOURCES = 4


class Column(IntEnum):
    """Columns of the refresh's table, one int64 each per segment."""

    ADDRESS = 0
    PAYLOAD = 1
    AXIS = 2
    ROW_BYTES = 3
    PAD = 4


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
