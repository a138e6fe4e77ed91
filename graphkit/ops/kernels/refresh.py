"""The refresh for CUDA. Contract and layout: ``graphkit.ops.refresh``.

Two kernels, since the entry is in host memory: a few programs fetch it over the bus once, then
one program per chunk copies and pads. Small reads over the bus hardly overlap, so a single kernel
in which every program reads the header takes longer with every program.
"""

from typing import Any

import triton
import triton.language as tl

from graphkit.ops.kernels.launch import launch, wait_for_kernel_before
from graphkit.ops.refresh import CHUNK_BYTES, FROM_PAYLOAD, KEEP, RING_WORDS, Column, Header, Ring

_COLUMNS = tl.constexpr(len(Column))
_ADDRESS = tl.constexpr(int(Column.ADDRESS))
_PAYLOAD = tl.constexpr(int(Column.PAYLOAD))
_AXIS = tl.constexpr(int(Column.AXIS))
_ROW_BYTES = tl.constexpr(int(Column.ROW_BYTES))
_PAD = tl.constexpr(int(Column.PAD))
_REQUESTS = tl.constexpr(int(Header.REQUESTS))
_TOKENS = tl.constexpr(int(Header.TOKENS))
_SEQUENCE = tl.constexpr(int(Header.SEQUENCE))
_SOURCES = tl.constexpr(int(Header.SOURCES))
_CONSUMED = tl.constexpr(int(Ring.CONSUMED))
_FAULT = tl.constexpr(int(Ring.FAULT))
_RING_WORDS = tl.constexpr(RING_WORDS)
_FROM_PAYLOAD = tl.constexpr(FROM_PAYLOAD)
_KEEP = tl.constexpr(KEEP)
_CHUNK = tl.constexpr(CHUNK_BYTES)


# Sizes differ between graphs: specialisation would compile these kernels for each.
@triton.jit(do_not_specialize=["entries", "entry_words"])
def fetch_kernel(mailbox, state, entry, fetches, entries, entry_words, STARTS_EARLY: tl.constexpr):
    """Copy the posted entry to the device, one program per row of ``fetches``."""
    wait_for_kernel_before(STARTS_EARLY)
    posted = mailbox + _RING_WORDS + (tl.load(state) % entries) * entry_words
    first = tl.load(fetches + tl.program_id(0) * 2) // 8
    words = tl.load(fetches + tl.program_id(0) * 2 + 1) // 8
    word = tl.arange(0, _CHUNK // 8)
    at = first + word
    tl.store(entry + at, tl.load(posted + at, mask=word < words), mask=word < words)


@triton.jit
def _copy(
    source, target, begin, live, end, pad, keep,
    BYTES: tl.constexpr, WORD: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Copy BYTES bytes from ``begin`` on, in words that divide ``begin``, ``live`` and ``end``."""
    at = begin // WORD + tl.arange(0, BYTES // WORD)
    is_live = at < live // WORD
    rows = tl.load(source.to(tl.pointer_type(DTYPE)) + at, mask=is_live & (keep == 0), other=0)
    tail = (pad >> (at % (8 // WORD)) * (8 * WORD)).to(DTYPE)
    write = (at < end // WORD) & ((keep == 0) | (at >= live // WORD))
    tl.store(target.to(tl.pointer_type(DTYPE)) + at, tl.where(is_live, rows, tail), mask=write)


@triton.jit(do_not_specialize=["batch_size", "num_tokens"])
def copy_kernel(
    mailbox, state, table, entry, copies, batch_size, num_tokens, STARTS_EARLY: tl.constexpr
):
    """Fill segments from the device's copy of the entry, one program per row of ``copies``.

    Program 0 also returns the entry to the host, since the fetch has read all of it.
    """
    wait_for_kernel_before(STARTS_EARLY)
    if tl.program_id(0) == 0:
        sequence = tl.load(state)
        if tl.load(entry + _SEQUENCE) != sequence:
            tl.store(mailbox + _FAULT, sequence + 1)
        tl.store(state, sequence + 1)
        tl.store(mailbox + _CONSUMED, sequence + 1)

    segment = tl.load(copies + tl.program_id(0) * 2)
    begin = tl.load(copies + tl.program_id(0) * 2 + 1).to(tl.int64) * _CHUNK
    columns = table + segment * _COLUMNS
    axis = tl.load(columns + _AXIS)
    row_bytes = tl.load(columns + _ROW_BYTES)
    target = tl.load(columns + _ADDRESS)
    pad = tl.load(columns + _PAD)
    named = tl.load(entry + _SOURCES + segment)
    payload = entry.to(tl.int64) + tl.load(columns + _PAYLOAD)
    source = tl.where(named == _FROM_PAYLOAD, payload, named)
    keep = (named == _KEEP).to(tl.int32)

    rows = tl.where(axis == _REQUESTS, batch_size, tl.where(axis == _TOKENS, num_tokens, 1))
    live = tl.load(entry + axis) * row_bytes
    end = rows * row_bytes
    alignment = (source * (1 - keep)) | target | live | end
    if alignment % 16 == 0:
        source = tl.multiple_of(source, 16)
        target = tl.multiple_of(target, 16)
        _copy(source, target, begin, live, end, pad, keep, _CHUNK, 8, tl.int64)
    elif alignment % 4 == 0:
        _copy(source, target, begin, live, end, pad, keep, _CHUNK, 4, tl.int32)
    else:
        for piece in range(_CHUNK // 1024):  # each byte takes a register
            _copy(source, target, begin + piece * 1024, live, end, pad, keep, 1024, 1, tl.int8)


def launch_refresh(args: Any) -> None:
    """Launch ``refresh``."""
    entry_words = (args.mailbox.numel() - RING_WORDS) // args.entries
    launch(fetch_kernel, (args.fetches.shape[0],), args, entry_words=entry_words)
    launch(copy_kernel, (args.copies.shape[0],), args)
