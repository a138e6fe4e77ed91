"""Layout of the mailbox and of the refresh's table of segments.

The mailbox is one int64 tensor in memory that host and device both access::

    [ consumed, fault, 6 unused | entry 0 | entry 1 | ... ]
    entry = [ sequence, requests, tokens, 1 | one source per segment | payload bytes ]

A *segment* is a contiguous run of rows. A field has one, unless a dimension precedes its rows:
mrope_positions [3, T] has three. A segment's source word is ``FROM_PAYLOAD``, ``KEEP``, or an
address that the device can read the live rows from.
"""

from __future__ import annotations

from enum import IntEnum

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
