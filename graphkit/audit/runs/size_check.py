"""Checks and measurements of one captured size."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any

import torch

from graphkit.audit.runs.comparison import Comparison
from graphkit.graphs import SizeTable, StateSnapshot
from graphkit.records import GraphRecord, Mismatch, SizeRecord
from graphkit.runners import Runner
from graphkit.runners.comparison.step_comparison import restorable_state

_REPEATS = {"cuda": 20, "cpu": 3}
"""Runs of which the median is taken."""
_TRY_ALL_UP_TO = 8
"""Captured sizes up to which every number of live requests is tried."""


def live_sizes(table: SizeTable, size: int) -> list[int]:
    """Return the numbers of live requests to try at a captured size: all, or ends and middle."""
    most = min(size, table.max_batch_size)
    if most <= _TRY_ALL_UP_TO:
        return list(range(1, most + 1))
    smaller = max((other for other in table if other < size), default=0)
    return sorted({1, smaller + 1, most // 2, most - 1, most})


class SizeCheck:
    """Compares and measures replays at one captured size.

    Args:
        runner: Captured.
        size: The captured size.
        draw: Returns a batch of a number of requests.
        compare: Compares the replay of a batch at a captured size with the step without a graph.

    Attributes:
        mismatches: Wrong replays so far.
    """

    def __init__(
        self,
        runner: Runner[Any, Any],
        size: int,
        draw: Callable[[int], Any],
        compare: Callable[[Any, Any, int], Comparison],
    ) -> None:
        self._runner, self._size, self._draw, self._compare = runner, size, draw, compare
        self._largest, self._compared = 0.0, 0
        self.mismatches: list[Mismatch] = []

    def compare(self, live: int) -> None:
        """Compare the replay of a batch of ``live`` requests with the step without a graph."""
        comparison = self._compare(self._runner, self._draw(live), self._size)
        self._compared += 1
        self._largest = max(self._largest, comparison.largest_difference)
        self.mismatches += comparison.mismatches

    def measured(self, record: SizeRecord) -> SizeRecord:
        """Return the size's record with the outcome so far and the duration of a full batch."""
        batch = self._draw(self._size)
        return replace(
            record,
            replay_us=self._duration_us(lambda: self._runner.replay(batch)),
            eager_us=self._duration_us(lambda: self._runner.fall_back(batch)),
            largest_difference=self._largest,
            batches_compared=self._compared,
        )

    def inspected(self, weights: Any) -> GraphRecord:
        """Return the graph's record, with the cost of its nodes for a full batch.

        Args:
            weights: As for ``Runner.inspect``.
        """
        batch = self._draw(self._size)
        with self._preserved():
            return self._runner.inspect(
                self._size,
                weights=weights,
                replay=lambda: self._runner.replay(batch, padded_batch_size=self._size),
            )

    def _preserved(self) -> StateSnapshot:
        return StateSnapshot(restorable_state(self._runner), self._runner.device)

    def _duration_us(self, run: Callable[[], object]) -> float:
        """Return the median time in microseconds until the results are available."""
        with self._preserved():
            return median(self._once_us(run) for _ in range(_REPEATS[self._runner.device.type]))

    def _once_us(self, run: Callable[[], object]) -> float:
        self._synchronise()
        began = time.perf_counter()
        run()
        self._synchronise()
        return (time.perf_counter() - began) * 1e6

    def _synchronise(self) -> None:
        if self._runner.device.type == "cuda":
            torch.cuda.synchronize(self._runner.device)
