"""Control of a device loop for CUDA. Contract: ``graphkit.ops.device_loop``.

One program each: the work is a few hundred words. ``advance_loop`` publishes an entry by a store
of its sequence number with release semantics at system scope, which orders the entry's other words
before it for the host.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from graphkit.ops.kernels.launch import launch
from graphkit.ops.loop_layout import (
    END_SIGNAL_WORDS,
    ENTRY_WORDS,
    RING_WORDS,
    Control,
    EndSignal,
    EntryWord,
    Ledger,
    LoopEnd,
    Report,
    RingWord,
)

_AGAIN = tl.constexpr(int(Control.AGAIN))
_BODY = tl.constexpr(int(Control.BODY))
_STEPS_LEFT = tl.constexpr(int(Control.STEPS_LEFT))
_WRITTEN = tl.constexpr(int(Control.WRITTEN))
_LAUNCH = tl.constexpr(int(Control.LAUNCH))
_STOP = tl.constexpr(int(RingWord.STOP))
_READ = tl.constexpr(int(RingWord.READ))
_RING_WORDS = tl.constexpr(RING_WORDS)
_ENTRY_WORDS = tl.constexpr(ENTRY_WORDS)
_ENTRY_SEQUENCE = tl.constexpr(int(EntryWord.SEQUENCE))
_ENTRY_BATCH_SIZE = tl.constexpr(int(EntryWord.BATCH_SIZE))
_ENTRY_LOOP_END = tl.constexpr(int(EntryWord.LOOP_END))
_ENTRY_LAUNCH = tl.constexpr(int(EntryWord.LAUNCH))
_ENTRY_LENGTH = tl.constexpr(int(EntryWord.LENGTH))
_ENTRY_PLAIN_TIME = tl.constexpr(int(EntryWord.PLAIN_TIME))
_ENTRY_STEP_TIME = tl.constexpr(int(EntryWord.STEP_TIME))
_PLAIN_TIME = tl.constexpr(int(Ledger.PLAIN_TIME))
_STEP_TIME = tl.constexpr(int(Ledger.STEP_TIME))
_ROW = tl.constexpr(int(Report.ROW))
_END = tl.constexpr(int(Report.END))
_BY_STEPS = tl.constexpr(int(LoopEnd.STEPS))
_BY_REQUEST = tl.constexpr(int(LoopEnd.REQUEST))
_BY_IDLE = tl.constexpr(int(LoopEnd.IDLE))
_BY_STOP = tl.constexpr(int(LoopEnd.STOPPED))
_BY_RING = tl.constexpr(int(LoopEnd.RING_FULL))
_SIGNAL_STOP = tl.constexpr(int(EndSignal.STOP))
_SIGNAL_FULL = tl.constexpr(int(EndSignal.RING_FULL))
_SIGNAL_WORDS = tl.constexpr(END_SIGNAL_WORDS)
_CHUNK = tl.constexpr(1024)
"""Words of a report that the program copies at a time."""


@triton.jit
def smallest_body(batch_sizes, live, bodies, BODIES: tl.constexpr):
    """Return the index of the smallest size that holds ``live`` requests."""
    each = tl.arange(0, BODIES)
    size = tl.load(batch_sizes + each, mask=each < bodies, other=0)
    smaller = tl.sum(((size < live) & (each < bodies)).to(tl.int32), 0)
    return tl.minimum(smaller, bodies - 1)


@triton.jit
def _publish(address, value):
    """Store an int64 with release semantics at system scope, which ``tl.store`` does not offer.

    ``st.release.sys`` is part of PTX since version 6.0, for sm_70 and later. Checked on Triton
    3.6.0 and 3.7.1 (``tests/unit/ops/test_triton_names.py``).
    """
    one = tl.arange(0, 1)
    tl.inline_asm_elementwise(
        "st.release.sys.global.u64 [$1], $2; mov.u64 $0, $2;", "=l,l,l",
        [(address + one).to(tl.int64), value + one],
        dtype=tl.int64, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["requests", "bodies"])
def begin_loop_kernel(
    req_pool_indices, is_watched, max_steps, launch, loop_rows, loop_watched, control, batch_sizes,
    requests, bodies, BLOCK: tl.constexpr, BODIES: tl.constexpr,
):  # fmt: skip
    """One program."""
    each = tl.arange(0, BLOCK)
    inside = each < requests
    row = tl.load(req_pool_indices + each, mask=inside, other=0)
    tl.store(loop_rows + each, row, mask=inside)
    watched = tl.load(is_watched + each, mask=inside, other=0)
    tl.store(loop_watched + each, watched, mask=inside)
    live = tl.sum((row > 0).to(tl.int32), 0)
    tl.store(control + _AGAIN, 1)
    tl.store(control + _BODY, smallest_body(batch_sizes, live, bodies, BODIES))
    tl.store(control + _STEPS_LEFT, tl.load(max_steps))
    tl.store(control + _LAUNCH, tl.load(launch))


@triton.jit
def _is_stopped(control, ring):
    """Return whether the host has stopped the launch."""
    return tl.load(ring + _STOP, volatile=True) >= tl.load(control + _LAUNCH)


@triton.jit
def _is_full(control, ring, entries):
    """Return whether the host has not read the entry that follows this step's."""
    read = tl.load(ring + _READ, volatile=True)
    return tl.load(control + _WRITTEN) + 1 - read >= entries


@triton.jit(do_not_specialize=["entries"])
def end_signals_kernel(signals, control, ring, entries):
    """One program."""
    word = tl.arange(0, _SIGNAL_WORDS)
    stopped = (word == _SIGNAL_STOP) & _is_stopped(control, ring)
    full = (word == _SIGNAL_FULL) & _is_full(control, ring, entries)
    tl.store(signals + word, (stopped | full).to(tl.float32))


@triton.jit(
    do_not_specialize=["length", "requests", "columns", "capacity", "entries", "bodies", "words"]
)
def advance_loop_kernel(
    report, loop_rows, loop_watched, control, batch_sizes, ring, signals, ledger, length,
    requests, columns, capacity, entries, entry_words, bodies, words,
    BLOCK: tl.constexpr, BODIES: tl.constexpr,
):  # fmt: skip
    """One program."""
    written = tl.load(control + _WRITTEN)
    launch = tl.load(control + _LAUNCH)
    steps_left = tl.load(control + _STEPS_LEFT) - 1
    entry = ring + _RING_WORDS + written % entries * entry_words
    word = tl.arange(0, _CHUNK)
    for first in range(0, words, _CHUNK):
        inside = first + word < words
        tl.store(entry + _ENTRY_WORDS + first + word,
                 tl.load(report + first + word, mask=inside), mask=inside)  # fmt: skip

    each = tl.arange(0, BLOCK)
    in_step = each < requests
    reported = tl.load(report + each * columns + _ROW, mask=in_step, other=0)
    end_of = tl.load(report + each * columns + _END, mask=in_step, other=0)
    row = tl.load(loop_rows + each, mask=in_step, other=0)
    watched = tl.load(loop_watched + each, mask=in_step, other=0).to(tl.int32)
    runs = ((reported > 0) & (end_of == 0)).to(tl.int32)
    place = tl.cumsum(runs, 0) - 1
    live = tl.sum(runs, 0)
    watched_ends = tl.sum(((end_of != 0) & (watched != 0)).to(tl.int32), 0)
    tl.debug_barrier()  # every row is read before any is written
    tl.store(loop_rows + place, row, mask=runs != 0)
    tl.store(loop_watched + place, watched.to(tl.int1), mask=runs != 0)
    behind = (each >= live) & (each < capacity)
    tl.store(loop_rows + each, tl.zeros_like(row), mask=behind)
    tl.store(loop_watched + each, tl.zeros_like(watched).to(tl.int1), mask=behind)

    if signals is None:
        stopped = _is_stopped(control, ring)
        full = _is_full(control, ring, entries)
    else:
        stopped = tl.load(signals + _SIGNAL_STOP) > 0
        full = tl.load(signals + _SIGNAL_FULL) > 0
    end = tl.where(full, _BY_RING, 0)
    end = tl.where(steps_left <= 0, _BY_STEPS, end)
    end = tl.where(stopped, _BY_STOP, end)
    end = tl.where(watched_ends > 0, _BY_REQUEST, end)
    end = tl.where(live == 0, _BY_IDLE, end)
    tl.store(control + _AGAIN, (end == 0).to(tl.int32))
    tl.store(control + _BODY, smallest_body(batch_sizes, live, bodies, BODIES))
    tl.store(control + _STEPS_LEFT, steps_left)
    tl.store(control + _WRITTEN, written + 1)
    tl.store(entry + _ENTRY_BATCH_SIZE, requests)
    tl.store(entry + _ENTRY_LOOP_END, end)
    tl.store(entry + _ENTRY_LAUNCH, launch)
    tl.store(entry + _ENTRY_LENGTH, length)
    if ledger is not None:
        plain_time, step_time = tl.load(ledger + _PLAIN_TIME), tl.load(ledger + _STEP_TIME)
        tl.store(entry + _ENTRY_PLAIN_TIME, (1e3 * plain_time).to(tl.int64))
        tl.store(entry + _ENTRY_STEP_TIME, (1e3 * step_time).to(tl.int64))
    tl.debug_barrier()  # every word of the entry precedes its sequence number
    _publish(entry + _ENTRY_SEQUENCE, written + 1)


def launch_begin_loop(args: Any) -> None:
    """Launch ``begin_loop``."""
    requests, bodies = len(args.req_pool_indices), len(args.batch_sizes)
    launch(
        begin_loop_kernel, (1,), args, requests=requests, bodies=bodies,
        BLOCK=triton.next_power_of_2(requests), BODIES=triton.next_power_of_2(bodies),
        num_warps=4,
    )  # fmt: skip


def launch_end_signals(args: Any, signals: torch.Tensor) -> None:
    """Launch ``end_signals``."""
    launch(end_signals_kernel, (1,), args, signals=signals, num_warps=1)


def launch_advance_loop(args: Any) -> None:
    """Launch ``advance_loop``."""
    (requests, columns), capacity = args.report.shape, len(args.loop_rows)
    bodies = len(args.batch_sizes)
    launch(
        advance_loop_kernel, (1,), args, requests=requests, columns=columns, capacity=capacity,
        entry_words=(args.ring.numel() - RING_WORDS) // args.entries, bodies=bodies,
        words=args.report.numel(), BLOCK=triton.next_power_of_2(capacity),
        BODIES=triton.next_power_of_2(bodies), num_warps=4,
    )  # fmt: skip
