"""Comparing the replays of one captured size with what the graph was made from.

Each live batch runs three ways from the same state: the padded path without a graph, the replay,
and the step on the live rows alone. Replay and padded path must agree to the bit: they run the same
kernels on the same shapes. The unpadded forwards may pick other kernels, so what they make gets a
tolerance; beyond it, padding leaks into live rows. What is chosen from the same numbers must be the
same: ``lockstep`` says how.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch

from graphkit.graphs import preserved
from graphkit.records import GraphRecord, Mismatch, SizeRecord
from graphkit.runners import Output, Runner
from graphkit.targets.compare import Tensors, first_difference, largest_difference, tolerance
from graphkit.targets.lockstep import Lockstep, Meeting, first_far
from graphkit.targets.target import CaptureTarget

_SEED = 20

GRAPH_DIFFERS = "the graph differs from the same padded path without it"
PADDING_LEAKS = "padding changes live rows"
"""What a mismatch says of the bug."""


class SizeCheck:
    """Compares live batches at one captured size.

    Args:
        target: Makes the batches; its forwards are watched by ``lockstep``.
        runner: Captured.
        lockstep: Lets the eager way follow the padded one.
        size: The captured size.
        rtol, atol: How far padded may be from unpadded numbers; left out, a few roundings.

    Attributes:
        mismatches: What was wrong so far.
    """

    def __init__(
        self,
        target: CaptureTarget,
        runner: Runner[Any],
        lockstep: Lockstep,
        size: int,
        *,
        rtol: float | None = None,
        atol: float | None = None,
    ) -> None:
        self.target, self.runner, self.lockstep, self.size = target, runner, lockstep, size
        self._rtol, self._atol = rtol, atol
        self.largest = 0.0
        self.compared = 0
        self.mismatches: list[Mismatch] = []

    def compare(self, live: int) -> None:
        """Run one live batch of the target the three ways."""
        self.compare_batch(self.target.batch(self.runner.mode, live, _SEED + live))

    def compare_batch(self, batch: Any) -> None:
        """Run a live batch the three ways."""
        live: int = batch.batch_size
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
        self._note(GRAPH_DIFFERS, live, graph)
        padding = self._met(meetings) or self._far(eager, padded, owner)
        self._note(PADDING_LEAKS, live, padding)

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

    def looked_into(self) -> GraphRecord:
        """What is inside the graph, and what its nodes cost for a full batch."""
        batch = self.target.batch(self.runner.mode, self.size, _SEED + self.size)
        with preserved(self.target.mutable_state or {}):
            return self.runner.inspect(
                self.size,
                weights=self.target.weights,
                replay=lambda: self.runner.replay(batch, padded_batch_size=self.size),
            )

    def _run(self, way: Callable[[], Output]) -> Tensors:
        with preserved(self.target.mutable_state or {}):
            return way().clone().tensors()

    def _met(self, meetings: Sequence[Meeting]) -> Mismatch | None:
        """The first forward that padding changes."""
        apart = (largest_difference(each.made, each.led) for each in meetings)
        self.largest = max([self.largest, *apart])
        return first_far(meetings, lambda each: self._far(each.made, each.led, each.owner))

    def _far(
        self, eager: Tensors, padded: Tensors, owner: Callable[[int, int], int]
    ) -> Mismatch | None:
        """The first number that padding changes by more than it may."""
        if self._rtol is None and self._atol is None:
            return first_difference(eager, padded, tolerance(eager), owner)
        return first_difference(eager, padded, self._atol or 0.0, owner, self._rtol or 0.0)

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
        with preserved(self.target.mutable_state or {}):
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
