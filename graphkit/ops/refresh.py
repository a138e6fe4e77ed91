"""The refresh: first node of every captured graph.

It reads the mailbox slot whose turn it is, copies every field's live rows into place, writes the
pad value into the tail, and publishes that the slot was consumed.

The mailbox is one int64 tensor in memory that host and device both see::

    [ consumed, fault, 6 unused | slot 0 | slot 1 | ... ]
    slot = [ sequence, requests, tokens, 1 | one source per segment | payload bytes ]

A *segment* is a run of rows that lie one after the other: a field has one, unless a dimension
stands before its rows (mrope_positions [3, T] has three). Its source word says where the live rows
come from: ``FROM_PAYLOAD``, ``KEEP``, or an address that the device can read.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from enum import IntEnum

import torch

RING_WORDS = 8
"""Words before slot 0: one cache line, so that polling does not touch a slot."""
CHUNK_BYTES = 4096
"""Bytes that one program of a CUDA kernel copies."""
FROM_PAYLOAD = 0
"""Source word: the rows stand in the slot."""
KEEP = -1
"""Source word: another graph has written the rows in place already."""


class Ring(IntEnum):
    """Words at the head of the mailbox."""

    CONSUMED = 0
    FAULT = 1


class Header(IntEnum):
    """Words at the head of a slot. The middle three count live rows, one per axis."""

    SEQUENCE = 0
    REQUESTS = 1
    TOKENS = 2
    ONE = 3
    SOURCES = 4


class Column(IntEnum):
    """What the table says of a segment, one int64 each."""

    ADDRESS = 0
    PAYLOAD = 1
    AXIS = 2
    ROW_BYTES = 3
    PAD = 4


@torch.library.custom_op(
    "graphkit::refresh", mutates_args=("segments", "mailbox", "state", "slot"), device_types="cpu"
)
def refresh(
    segments: Sequence[torch.Tensor],
    mailbox: torch.Tensor,
    state: torch.Tensor,
    table: torch.Tensor,
    slot: torch.Tensor,  # noqa: ARG001 - for the CUDA kernels, like the next two
    fetches: torch.Tensor,  # noqa: ARG001
    copies: torch.Tensor,  # noqa: ARG001
    slots: int,
    batch_size: int,
    num_tokens: int,
) -> None:
    """Fill the first ``batch_size`` requests and ``num_tokens`` tokens of every segment.

    May be captured; allocates nothing on the device and never synchronises.

    Args:
        segments: Each segment's rows at full capacity.
        mailbox: The ring; pinned if the device is CUDA.
        state: The next sequence number, on the device.
        table: A row of ``Column`` per segment, on the device.
        slot: Where the device keeps its copy of the slot.
        fetches: (first byte, bytes) of the slot's parts that this size needs, on the device.
        copies: (segment, chunk) for everything that this size fills, on the device.
        slots: Slots in the ring.
        batch_size: Captured requests.
        num_tokens: Captured tokens.

    Shapes:
        segments[i]: [capacity, ...] contiguous.
        mailbox: [RING_WORDS + slots * words] int64.
        state: [1] int64. table: [len(segments), len(Column)] int64. slot: [words] int64.
        fetches, copies: [programs, 2] int32.
    """
    sequence = int(state)
    posted = mailbox[RING_WORDS:].view(slots, -1)[sequence % slots]
    padded = {Header.REQUESTS: batch_size, Header.TOKENS: num_tokens, Header.ONE: 1}
    for i, (rows, facts) in enumerate(zip(segments, table.tolist(), strict=True)):
        live, source = int(posted[facts[Column.AXIS]]), int(posted[Header.SOURCES + i])
        size = live * facts[Column.ROW_BYTES]
        if source != KEEP and size:
            payload = posted.data_ptr() + facts[Column.PAYLOAD]
            _bytes(rows)[:size] = _read(payload if source == FROM_PAYLOAD else source, size)
        end = padded[Header(facts[Column.AXIS])] * facts[Column.ROW_BYTES]
        _bytes(rows)[size:end] = _pattern(facts[Column.PAD], size, end)
    if int(posted[Header.SEQUENCE]) != sequence:
        mailbox[Ring.FAULT] = sequence + 1
    state.fill_(sequence + 1)
    mailbox[Ring.CONSUMED] = sequence + 1


@refresh.register_kernel("cuda")
def _(
    segments: Sequence[torch.Tensor],  # noqa: ARG001 - their addresses stand in the table
    mailbox: torch.Tensor,
    state: torch.Tensor,
    table: torch.Tensor,
    slot: torch.Tensor,
    fetches: torch.Tensor,
    copies: torch.Tensor,
    slots: int,
    batch_size: int,
    num_tokens: int,
) -> None:
    from graphkit.ops.kernels.refresh import launch_refresh

    launch_refresh(mailbox, state, table, slot, fetches, copies, slots, batch_size, num_tokens)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


def _read(address: int, size: int) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)


def _pattern(pad: int, begin: int, end: int) -> torch.Tensor:
    """The pad's eight bytes over and over, from byte ``begin`` to byte ``end`` of a segment."""
    eight = torch.tensor([pad], dtype=torch.int64).view(torch.uint8)
    return eight[torch.arange(begin, end) % 8]
