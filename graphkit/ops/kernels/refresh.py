"""The refresh for CUDA. Contract and layout: ``graphkit.ops.refresh``."""

import torch
import triton
import triton.language as tl

from graphkit.ops.refresh import (
    CHUNK_BYTES,
    FROM_PAYLOAD,
    KEEP,
    RING_WORDS,
    Column,
    Header,
    Ring,
    State,
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
_NEXT = tl.constexpr(int(State.SEQUENCE))
_ENDED = tl.constexpr(int(State.ENDED))
_CONSUMED = tl.constexpr(int(Ring.CONSUMED))
_FAULT = tl.constexpr(int(Ring.FAULT))
_RING_WORDS = tl.constexpr(RING_WORDS)
_FROM_PAYLOAD = tl.constexpr(FROM_PAYLOAD)
_KEEP = tl.constexpr(KEEP)
_CHUNK = tl.constexpr(CHUNK_BYTES)


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


@triton.jit
def refresh_kernel(mailbox, state, table, work, slots, slot_words, batch_size, num_tokens):
    """One program per (segment, chunk) of ``work``; the last one to end publishes."""
    sequence = tl.load(state + _NEXT)
    slot = mailbox + _RING_WORDS + (sequence % slots) * slot_words
    segment = tl.load(work + tl.program_id(0) * 2)
    chunk = tl.load(work + tl.program_id(0) * 2 + 1)
    facts = table + segment * _COLUMNS
    axis = tl.load(facts + _AXIS)
    row_bytes = tl.load(facts + _ROW_BYTES)
    target = tl.load(facts + _ADDRESS)
    pad = tl.load(facts + _PAD)

    # Plain loads see what the host wrote before the launch, and let programs share one trip over
    # the bus; volatile ones cost a trip for every warp (1.7 ms for 400 programs on an H200).
    live_rows = tl.load(slot + axis)
    named = tl.load(slot + _SOURCES + segment)
    payload = slot.to(tl.int64) + tl.load(facts + _PAYLOAD)
    source = tl.where(named == _FROM_PAYLOAD, payload, named)
    keep = (named == _KEEP).to(tl.int32)

    rows = tl.where(axis == _REQUESTS, batch_size, tl.where(axis == _TOKENS, num_tokens, 1))
    live = live_rows * row_bytes
    end = rows * row_bytes
    begin = chunk.to(tl.int64) * _CHUNK
    ragged = (source * (1 - keep)) | target | live | end
    if ragged % 16 == 0:
        source = tl.multiple_of(source, 16)
        target = tl.multiple_of(target, 16)
        _copy(source, target, begin, live, end, pad, keep, _CHUNK, 8, tl.int64)
    elif ragged % 4 == 0:
        _copy(source, target, begin, live, end, pad, keep, _CHUNK, 4, tl.int32)
    else:
        for piece in range(_CHUNK // 1024):  # bytes take a register each
            _copy(source, target, begin + piece * 1024, live, end, pad, keep, 1024, 1, tl.int8)

    # No thread of this program may still be reading the slot when the host gets it back.
    tl.debug_barrier()
    ended = tl.atomic_add(state + _ENDED, 1, sem="acq_rel")
    if ended == tl.num_programs(0) - 1:
        if tl.load(slot + _SEQUENCE) != sequence:
            tl.store(mailbox + _FAULT, sequence + 1)
        tl.store(state + _ENDED, 0)
        tl.store(state + _NEXT, sequence + 1)
        tl.store(mailbox + _CONSUMED, sequence + 1)


def launch_refresh(
    mailbox: torch.Tensor,
    state: torch.Tensor,
    table: torch.Tensor,
    work: torch.Tensor,
    slots: int,
    batch_size: int,
    num_tokens: int,
) -> None:
    """Launch on the current stream; arguments as in ``graphkit.ops.refresh.refresh``."""
    slot_words = (mailbox.numel() - RING_WORDS) // slots
    refresh_kernel[(work.shape[0],)](
        mailbox, state, table, work, slots, slot_words, batch_size, num_tokens,
        num_warps=1,  # every warp fetches the header over the bus
    )  # fmt: skip
