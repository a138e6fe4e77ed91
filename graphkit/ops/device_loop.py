"""Control of a device loop: which requests run in the next step, and whether there is one.

Layouts: ``graphkit.ops.loop_layout``.

Dimensions: M requests of the largest size, B requests of the size that ran, C columns of a report.
"""

from __future__ import annotations

from typing import Annotated

import torch

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
    RequestEnd,
    RingWord,
)
from graphkit.ops.registration import register_op


@register_op(mutates_args=("loop_rows", "loop_watched", "control"))
def begin_loop(
    req_pool_indices: Annotated[torch.Tensor, "[M] int64"],
    is_watched: Annotated[torch.Tensor, "[M] bool"],
    max_steps: Annotated[torch.Tensor, "[1] int64"],
    launch: Annotated[torch.Tensor, "[1] int64"],
    loop_rows: Annotated[torch.Tensor, "[M] int64, contiguous"],
    loop_watched: Annotated[torch.Tensor, "[M] bool, contiguous"],
    control: Annotated[torch.Tensor, "[5] int64, contiguous"],
    batch_sizes: Annotated[torch.Tensor, "[bodies] int32"],
) -> None:
    """Set up a loop over a batch, whose first step always runs.

    Args:
        req_pool_indices: Rows of the batch, then 0.
        is_watched: Whether the loop ends when the request ends.
        max_steps: Most steps of the loop.
        launch: Number of the launch, larger than any before.
        loop_rows: Receives the rows of the first step.
        loop_watched: Receives ``is_watched`` in the order of ``loop_rows``.
        control: The control words, see ``Control``.
        batch_sizes: Captured sizes in ascending order.
    """
    loop_rows.copy_(req_pool_indices)
    loop_watched.copy_(is_watched)
    control[Control.AGAIN] = 1
    control[Control.BODY] = _body(batch_sizes, (req_pool_indices > 0).sum())
    control[Control.STEPS_LEFT] = max_steps[0]
    control[Control.LAUNCH] = launch[0]


@register_op()
def end_signals(
    control: Annotated[torch.Tensor, "[5] int64, contiguous"],
    ring: Annotated[torch.Tensor, "[words >= 16] int64, on any device"],
    entries: Annotated[int, "entries >= 1"],
) -> Annotated[torch.Tensor, "[4] float32"]:
    """Return why the host of this rank asks for the end of the loop after this step.

    Ranks add their signals up and pass the sum to ``advance_loop``, so that their loops end after
    the same step.

    Args:
        control: The control words, see ``Control``.
        ring: As for ``advance_loop``.
        entries: As for ``advance_loop``.

    Returns:
        [4] float32, see ``EndSignal``: 1 if the host has stopped the launch, 1 if it has not read
        the entry that follows this step's.
    """
    return _signals(control, ring, entries)


def _signals(control: torch.Tensor, ring: torch.Tensor, entries: int) -> torch.Tensor:
    signals = torch.zeros(END_SIGNAL_WORDS, dtype=torch.float32)
    written = int(control[Control.WRITTEN]) + 1
    signals[EndSignal.STOP] = int(ring[RingWord.STOP]) >= int(control[Control.LAUNCH])
    signals[EndSignal.RING_FULL] = written - int(ring[RingWord.READ]) >= entries
    return signals


@register_op(mutates_args=("loop_rows", "loop_watched", "control", "ring"))
def advance_loop(
    report: Annotated[torch.Tensor, "[B, C] int32"],
    loop_rows: Annotated[torch.Tensor, "[M] int64, contiguous"],
    loop_watched: Annotated[torch.Tensor, "[M] bool, contiguous"],
    control: Annotated[torch.Tensor, "[5] int64, contiguous"],
    batch_sizes: Annotated[torch.Tensor, "[bodies] int32"],
    ring: Annotated[torch.Tensor, "[16 + entries * (16 + M * C)] int64, contiguous, on any device"],
    entries: Annotated[int, "entries >= 1"],
    signals: Annotated[torch.Tensor | None, "[4] float32, contiguous"] = None,
    length: int = 0,
    ledger: Annotated[torch.Tensor | None, "[4] float64, contiguous"] = None,
) -> None:
    """Publish a step's report, remove ended requests, and decide whether another step runs.

    The remaining requests move to the front of ``loop_rows`` in their order, so that the next step
    runs at the smallest size that holds them.

    Args:
        report: The step's report.
        loop_rows: Rows of the step, then 0; receives the rows of the next step.
        loop_watched: Whether the loop ends when the request ends, in the same order.
        control: The control words, see ``Control``.
        batch_sizes: Captured sizes in ascending order.
        ring: The output ring; on the CPU, pinned if the other tensors are on CUDA.
        entries: Entries of the ring.
        signals: Sum of the ``end_signals`` of all ranks; ``None`` selects the signals of this rank.
        length: Index of the draft length of the step.
        ledger: Times of the steps before, see ``Ledger``; ``None`` with
            one draft length.
    """
    size, written = len(report), int(control[Control.WRITTEN])
    entry = ring[RING_WORDS:].view(entries, -1)[written % entries]
    entry[ENTRY_WORDS : ENTRY_WORDS + report.numel()] = report.flatten()
    runs = (report[:, Report.ROW] > 0) & (report[:, Report.END] == RequestEnd.RUNNING)
    ended = report[:, Report.END] != RequestEnd.RUNNING
    live, steps_left = int(runs.sum()), int(control[Control.STEPS_LEFT]) - 1
    launch = int(control[Control.LAUNCH])
    if signals is None:
        signals = _signals(control, ring, entries)
    end = LoopEnd.RUNNING
    if not live:
        end = LoopEnd.IDLE
    elif bool((ended & loop_watched[:size]).any()):
        end = LoopEnd.REQUEST
    elif signals[EndSignal.STOP]:
        end = LoopEnd.STOPPED
    elif steps_left <= 0:
        end = LoopEnd.STEPS
    elif signals[EndSignal.RING_FULL]:
        end = LoopEnd.RING_FULL
    for kept in (loop_rows, loop_watched):
        moved = kept[:size][runs]
        kept.zero_()
        kept[:live] = moved
    control[Control.AGAIN] = int(end is LoopEnd.RUNNING)
    control[Control.BODY] = _body(batch_sizes, torch.tensor(live))
    control[Control.STEPS_LEFT] = steps_left
    control[Control.WRITTEN] = written + 1
    entry[EntryWord.BATCH_SIZE] = size
    entry[EntryWord.LOOP_END] = end
    entry[EntryWord.LAUNCH] = launch
    entry[EntryWord.LENGTH] = length
    if ledger is not None:
        entry[EntryWord.PLAIN_TIME] = int(1e3 * float(ledger[Ledger.PLAIN_TIME]))
        entry[EntryWord.STEP_TIME] = int(1e3 * float(ledger[Ledger.STEP_TIME]))
    entry[EntryWord.SEQUENCE] = written + 1


def _body(batch_sizes: torch.Tensor, live: torch.Tensor) -> int:
    """Return the index of the smallest size that holds so many requests."""
    return int((batch_sizes < live).sum().clamp(max=len(batch_sizes) - 1))
