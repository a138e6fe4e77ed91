"""What stands where in the memory that host and device both see, and in the refresh's table.

The mailbox is one int64 tensor in memory that host and device both see::

    [ consumed, fault, 6 unused | entry 0 | entry 1 | ... ]
    entry = [ sequence, requests, tokens, 1 | one source per segment | payload bytes ]

A *segment* is a run of rows that lie one after the other: a field has one, unless a dimension
stands before its rows (mrope_positions [3, T] has three). Its source word says where the live rows
come from: ``FROM_PAYLOAD``, ``KEEP``, or an address that the device can read.
"""

from __future__ import annotations

from enum import IntEnum

RING_WORDS = 8
"""Words before entry 0: one cache line, so that polling does not touch an entry."""
CHUNK_BYTES = 4096
"""Bytes that one program of a CUDA kernel copies."""
FROM_PAYLOAD = 0
"""Source word: the rows stand in the entry."""
KEEP = -1
"""Source word: another graph has written the rows in place already."""


class Ring(IntEnum):
    """Words at the head of the mailbox."""

    CONSUMED = 0
    FAULT = 1


class Header(IntEnum):
    """Words at the head of an entry. The middle three count live rows, one per axis."""

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
