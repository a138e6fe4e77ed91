"""Comparison of a whole step with its graph: its report, and the state that it leaves."""

from __future__ import annotations

from dataclasses import replace

from graphkit.graphs import StateSnapshot
from graphkit.records import Mismatch
from graphkit.step import SpecStepInputs, SpecStepRunner
from graphkit.verify.comparison import GRAPH_DIFFERS, Comparison, restorable_state
from graphkit.verify.differences import Tensors, largest_difference
from graphkit.verify.request_runs import RequestRuns, Requests
from graphkit.verify.request_state import request_state
from graphkit.verify.rounding import Rounding
from graphkit.verify.step_runs import StepRuns

LOOP_DIFFERS = "a launch of several steps differs from single replays"
"""Kind of mismatches."""


def compare_steps(
    runner: SpecStepRunner, batch: SpecStepInputs, padded_batch_size: int
) -> Comparison:
    """Replay a whole step, run it padded without its graph from the same state, and compare.

    Report and state of the requests must agree bit for bit; see ``StepRuns``. The step is not run
    without padding: where two logits nearly tie, its kernels may choose another token. Restores
    state and random numbers.

    Args:
        runner: Captured; the requests of the batch have been admitted.
        batch: At least one live request.
        padded_batch_size: The captured size to run at.
    """
    with StateSnapshot(restorable_state(runner), runner.device) as start:
        runs = _WholeStepRuns(runner, batch, padded_batch_size, start)
        replayed, padded = runs.replay(), runs.padded()
        found = runs.graph_difference(padded, replayed)
        if found is not None:
            found = runs.judge_graph(padded, replayed).wrong
    mismatches: tuple[Mismatch, ...] = ()
    if found is not None:
        where = runner.mode.name, batch.batch_size, padded_batch_size
        mismatches = (_located(found, GRAPH_DIFFERS, *where),)
    return Comparison(replayed, mismatches, largest_difference(padded, replayed))


def compare_loop(
    runner: SpecStepRunner, requests: Requests, steps: int
) -> tuple[int, Mismatch | None]:
    """Run requests in one launch, and again in replays of single steps, and compare.

    Their reports must be equal, and their state up to rounding.

    Args:
        runner: Captured, with loops.
        requests: As for ``RequestRuns``. They are admitted several times, and released.
        steps: Most steps.

    Returns:
        The number of steps, and the first difference if there is one. Without any steps the
        replays were not repeatable, so that nothing could be compared.
    """
    rounding, runs = Rounding(runner.sizes.dtype), RequestRuns(runner, requests)
    replayed, launched = runs.replayed(steps), runs.launched(steps, steps)
    found = replayed.differences(launched, rounding)
    is_repeatable = not found or not replayed.differences(runs.replayed(steps), rounding)
    runs.release()
    if not is_repeatable:
        return 0, None
    mismatch = found.get("reports") or next(iter(found.values()), None)
    if mismatch is not None:
        size = runner.table.fit(len(requests))
        mismatch = _located(mismatch, LOOP_DIFFERS, runner.mode.name, len(requests), size)
    return len(launched.reports), mismatch


def _located(found: Mismatch, kind: str, mode: str, batch_size: int, size: int) -> Mismatch:
    return replace(found, kind=kind, mode=mode, batch_size=batch_size, padded_batch_size=size)


class _WholeStepRuns(StepRuns):
    """Runs of a whole step, whose outputs include the state that it leaves."""

    def __init__(
        self,
        runner: SpecStepRunner,
        batch: SpecStepInputs,
        padded_batch_size: int,
        start: StateSnapshot,
    ) -> None:
        super().__init__(runner, batch, padded_batch_size, start)
        self._step, self._rows = runner.device_step, batch.req_pool_indices.tolist()
        lengths = runner.state.seq_lens[batch.req_pool_indices.to(runner.device)]
        self._positions = int(lengths.max()) + self._step.max_path

    def replay(self) -> Tensors:
        return {**super().replay(), **self._state()}

    def padded(self) -> Tensors:
        return {**super().padded(), **self._state()}

    def _state(self) -> Tensors:
        self._runner.backend.wait_for_replays()
        return request_state(self._step, self._rows, self._positions)
