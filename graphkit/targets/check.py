"""Capturing a target and comparing every replay with what the graph was made from.

Each live batch runs three ways from the same state: the padded path without a graph, the replay,
and the step on the live rows alone. Replay and padded path must agree to the bit: they run the same
kernels on the same shapes. The unpadded forwards may pick other kernels, so what they make gets a
tolerance; beyond it, padding leaks into live rows. ``Lockstep`` says how modes that choose tokens
are compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch

from graphkit.errors import TargetError
from graphkit.graphs import Backend, preserved
from graphkit.records import CaptureRecord, Mismatch, ModeRecord, SizeRecord
from graphkit.runners import Output, Runner
from graphkit.spec import ForwardMode
from graphkit.targets.compare import Tensors, first_difference, largest_difference, tolerance
from graphkit.targets.lockstep import Lockstep, Meeting
from graphkit.targets.target import CaptureTarget

Progress = Callable[[int, int, str], None]
_SEED = 20


def capture_target(
    target: CaptureTarget,
    *,
    modes: Sequence[ForwardMode] | None = None,
    batch_sizes: Sequence[int] | None = None,
    device: str = "auto",
    backend: Backend | None = None,
    progress: Progress = lambda _done, _total, _what: None,
) -> CaptureRecord:
    """Capture every mode and size, and check each size with every live batch that it holds.

    Args:
        target: What to capture.
        modes: Modes to capture; ``None`` takes all that the target has.
        batch_sizes: Sizes to capture; ``None`` takes the target's.
        device: ``auto``, ``cpu`` or ``cuda``.
        backend: As for ``Runner``.
        progress: Called with steps done, steps in all, and what is being done.

    Returns:
        The record; its ``mismatches`` are empty if every replay was right.

    Raises:
        CaptureError: A forward cannot be captured.
        TargetError: The target lacks a mode.
    """
    records = []
    chosen = dict.fromkeys(modes or target.forwards)  # a mode that was named twice runs once
    if not chosen:
        raise TargetError(f"target {target.name!r} has no forward. Give it one for some mode.")
    lockstep = Lockstep()
    watched = lockstep.watch(target)
    for mode in chosen:
        with watched.runner(
            mode, batch_sizes=batch_sizes, device=device, backend=backend
        ) as runner:
            records.append(_capture_mode(watched, runner, lockstep, progress))
    return replace(
        records[0],
        target=target.name,
        modes=tuple(mode for record in records for mode in record.modes),
        mismatches=tuple(m for record in records for m in record.mismatches),
    )


def _capture_mode(
    target: CaptureTarget, runner: Runner[Any], lockstep: Lockstep, progress: Progress
) -> CaptureRecord:
    sizes = runner.table.sizes
    total, done = len(sizes) + sum(sizes), 0

    def step(what: str) -> None:
        nonlocal done
        done += 1
        progress(done, total, f"{runner.mode.name} {what}")

    progress(0, total, f"{runner.mode.name} capturing {sizes[-1]}")
    record = runner.capture(progress=lambda size: step(f"captured {size.batch_size}"))
    checked: list[SizeRecord] = []
    mismatches: list[Mismatch] = []
    for size in record.modes[0].sizes:
        check = _SizeCheck(target, runner, lockstep, size.batch_size)
        for live in range(1, size.batch_size + 1):
            check.compare(live)
            step(f"comparing {live} at {size.batch_size}")
        checked.append(check.measured(size))
        mismatches += check.mismatches
    if not checked:
        progress(total, total, f"{runner.mode.name} stays eager")
    mode: ModeRecord = replace(record.modes[0], sizes=tuple(checked))
    return replace(record, modes=(mode,), mismatches=tuple(mismatches))


class _SizeCheck:
    """Compares live batches at one captured size."""

    def __init__(
        self, target: CaptureTarget, runner: Runner[Any], lockstep: Lockstep, size: int
    ) -> None:
        self.target, self.runner, self.lockstep, self.size = target, runner, lockstep, size
        self.largest = 0.0
        self.compared = 0
        self.mismatches: list[Mismatch] = []

    def compare(self, live: int) -> None:
        """Run one live batch the three ways."""
        batch = self.target.batch(self.runner.mode, live, _SEED + live)
        self.runner.shadow = "padded"
        with self.lockstep.lead():
            padded = self._run(lambda: self.runner.replay(batch, padded_batch_size=self.size))
        self.runner.shadow = None
        replayed = self._run(lambda: self.runner.replay(batch, padded_batch_size=self.size))
        with self.lockstep.follow() as meetings:
            eager = self._run(lambda: self.runner.fall_back(batch))
        self.compared += 1
        self.largest = max(self.largest, largest_difference(padded, replayed))

        def owner(row: int, rows: int) -> int:
            return row * live // rows

        graph = first_difference(padded, replayed, 0.0, owner)
        self._note("the graph differs from the same padded path without it", live, graph)
        padding = self._met(meetings) or first_difference(eager, padded, tolerance(eager), owner)
        self._note("padding changes live rows", live, padding)

    def measured(self, size: SizeRecord) -> SizeRecord:
        """The size's record with what was compared and how long a full batch takes."""
        batch = self.target.batch(self.runner.mode, self.size, _SEED + self.size)
        return replace(
            size,
            replay_us=self._time(lambda: self.runner.replay(batch)),
            eager_us=self._time(lambda: self.runner.fall_back(batch)),
            largest_difference=self.largest,
            batches_compared=self.compared,
        )

    def _run(self, way: Callable[[], Output]) -> Tensors:
        with preserved(self.target.state or {}):
            return way().clone().tensors()

    def _met(self, meetings: Sequence[Meeting]) -> Mismatch | None:
        """The first forward that padding changes."""
        found = None
        for step, each in enumerate(meetings):
            self.largest = max(self.largest, largest_difference(each.made, each.led))
            wrong = first_difference(each.made, each.led, tolerance(each.made), each.owner)
            if wrong is not None and len(meetings) > 1:
                wrong = replace(wrong, field=f"{wrong.field} of step {step}")
            found = found or wrong
        return found

    def _note(self, kind: str, live: int, found: Mismatch | None) -> None:
        if found is not None:
            self.mismatches.append(
                replace(
                    found,
                    mode=self.runner.mode.name,
                    batch_size=live,
                    padded_batch_size=self.size,
                    kind=kind,
                )
            )

    def _time(self, way: Callable[[], Output]) -> float:
        """Median microseconds until the results are there."""
        repeats = 20 if self.runner.device.type == "cuda" else 3
        with preserved(self.target.state or {}):
            return median(self._once(way) for _ in range(repeats))

    def _once(self, way: Callable[[], Output]) -> float:
        self._wait()
        began = time.perf_counter()
        way()
        self._wait()
        return (time.perf_counter() - began) * 1e6

    def _wait(self) -> None:
        if self.runner.device.type == "cuda":
            torch.cuda.synchronize(self.runner.device)
