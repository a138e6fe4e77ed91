"""The refresh for CUDA. Contract: ``graphkit.ops.refresh``; layout: ``mailbox_layout``.

Two kernels, since the entry lies in host memory: a few programs fetch it over the bus once, then as
many as it takes copy and pad. Small reads over the bus hardly overlap, so a single kernel whose
every program reads the header for itself takes longer with every program.
"""

import torch
import triton
import triton.language as tl

from graphkit.ops.mailbox_layout import (
    CHUNK_BYTES,
    FROM_PAYLOAD,
    KEEP,
    RING_WORDS,
    Column,
    Header,
    Ring,
)

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


# Sizes differ from graph to graph: specialised on, they would compile these kernels anew for each.
@triton.jit(do_not_specialize=["entries", "entry_words"])
def fetch_kernel(mailbox, state, entry, fetches, entries, entry_words):
    """Copy the posted entry to the device, one program per row of ``fetches``."""
    posted = mailbox + _RING_WORDS + (tl.load(state) % entries) * entry_words
    first = tl.load(fetches + tl.program_id(0) * 2) // 8
    words = tl.load(fetches + tl.program_id(0) * 2 + 1) // 8
    at = tl.arange(0, _CHUNK // 8)
    tl.store(entry + first + at, tl.load(posted + first + at, mask=at < words), mask=at < words)


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
def copy_kernel(mailbox, state, table, entry, copies, batch_size, num_tokens):
    """Fill segments from the device's copy of the entry, one program per row of ``copies``.

    Program 0 also gives the entry back to the host: the fetch before this kernel has read it.
    """
    if tl.program_id(0) == 0:
        sequence = tl.load(state)
        if tl.load(entry + _SEQUENCE) != sequence:
            tl.store(mailbox + _FAULT, sequence + 1)
        tl.store(state, sequence + 1)
        tl.store(mailbox + _CONSUMED, sequence + 1)

    segment = tl.load(copies + tl.program_id(0) * 2)
    begin = tl.load(copies + tl.program_id(0) * 2 + 1).to(tl.int64) * _CHUNK
    facts = table + segment * _COLUMNS
    axis = tl.load(facts + _AXIS)
    row_bytes = tl.load(facts + _ROW_BYTES)
    target = tl.load(facts + _ADDRESS)
    pad = tl.load(facts + _PAD)
    named = tl.load(entry + _SOURCES + segment)
    payload = entry.to(tl.int64) + tl.load(facts + _PAYLOAD)
    source = tl.where(named == _FROM_PAYLOAD, payload, named)
    keep = (named == _KEEP).to(tl.int32)

    rows = tl.where(axis == _REQUESTS, batch_size, tl.where(axis == _TOKENS, num_tokens, 1))
    live = tl.load(entry + axis) * row_bytes
    end = rows * row_bytes
    ragged = (source * (1 - keep)) | target | live | end
    if ragged % 16 == 0:
        source = tl.multiple_of(source, 16)
        target = tl.multiple_of(target, 16)
        _copy(source, target, begin, live, end, pad, keep, _CHUNK, 8, tl.int64)
    elif ragged % 4 == 0:
        _copy(source, target, begin, live, end, pad, keep, _CHUNK, 4, tl.int32)
    else:
        for piece in range(_CHUNK // 1024):  # a byte takes a register
            _copy(source, target, begin + piece * 1024, live, end, pad, keep, 1024, 1, tl.int8)


def launch_refresh(
    mailbox: torch.Tensor,
    state: torch.Tensor,
    table: torch.Tensor,
    entry: torch.Tensor,
    fetches: torch.Tensor,
    copies: torch.Tensor,
    entries: int,
    batch_size: int,
    num_tokens: int,
) -> None:
    """Launch on the current stream; arguments as in ``graphkit.ops.refresh.refresh``."""
    entry_words = (mailbox.numel() - RING_WORDS) // entries
    fetch_kernel[(fetches.shape[0],)](mailbox, state, entry, fetches, entries, entry_words)
    copy_kernel[(copies.shape[0],)](mailbox, state, table, entry, copies, batch_size, num_tokens)
