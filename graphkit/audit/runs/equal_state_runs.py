"""One step of a captured runner, run several times from the same state, and compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Self

import torch

from graphkit.audit.runs.first_node import FirstNode, first_node
from graphkit.audit.runs.forward_trace import ForwardWatch, InputWrite, Weights
from graphkit.audit.runs.live_rows import RowPlaces, matched_rows, same_rows
from graphkit.audit.runs.teacher_forcing import TeacherForcing
from graphkit.graphs import CapturedGraph, NodeOrigin, SizeTable, StateSnapshot
from graphkit.records import Mismatch
from graphkit.runners import Output, Runner
from graphkit.runners.comparison import (
    GRAPH_DIFFERS,
    INPUT_WRITTEN,
    PADDING_LEAKS,
    GraphVerdict,
    Rounding,
    judge_graph,
)
from graphkit.runners.comparison.differences import (
    Allowed,
    Tensors,
    even_owner,
    first_difference,
    first_not_finite,
    largest_difference,
    largest_ulps,
)
from graphkit.runners.comparison.step_comparison import restorable_state

NOT_FINITE = "the output is not finite, with and without the graph"
"""Kind of a mismatch that no comparison shows: NaN or infinity in every run."""
_TRY_ALL_UP_TO = 8
"""Captured sizes up to which every number of live requests is tried."""


@contextmanager
def restored(
    runner: Runner[Any, Any], tensors: Mapping[str, torch.Tensor] | None = None
) -> Iterator[StateSnapshot]:
    """Run a block without gradients and statistics, and restore state and random numbers after it.

    The state is the runner's ``restorable_state``, and further ``tensors`` by name.
    """
    state = restorable_state(runner) | dict(tensors or {})
    with torch.no_grad(), runner.without_stats(), StateSnapshot(state, runner.device) as start:
        yield start


class EqualStateRuns:
    """Runs a live batch with and without its graph, each time from the same state.

    - ``replay``: the graph.
    - ``padded``: the step that the graph was captured from, on the same shapes, without the graph.
      It runs the same kernels, so a replay must agree with it bit for bit. Where repeated padded
      runs differ, as sums in changing order do, the replay may differ like them.
    - ``unpadded``: the step on the live rows alone. It may run other kernels, which round
      differently; beyond rounding, padding has changed live rows. ``padding_difference`` compares
      it with the last padded run, whose forwards it follows, see ``teacher_forcing``.

    Runs return copies of the live rows, by field. ``replay`` and ``padded`` may have pads of their
    own and a state that ``prepare`` changes, to show whether live rows depend on them. As a context
    manager it restores the state when its block ends, also after an error.

    Args:
        runner: Captured. No other batch may run meanwhile.
        batch: The mode's inputs with live rows.
        padded_batch_size: The captured size to run at.
        start: Restored before each run; ``None`` saves all state of the runner, see
            ``restorable_state``.
        tolerance: Multiple of the usual rounding that is allowed, see ``Rounding``.
        padded_batch: The batch with pads of its own after the live rows, for replays and padded
            runs.
        prepare: Called before each replay and padded run, when state is restored.
        read_state: Returns copies of state after a replay or padded run, as further fields.

    Attributes:
        runner, batch, padded_batch_size, start, padded_batch: The arguments of these names.
        rounding: Rounding of the runner's dtype.
        largest_difference: Largest difference between the unpadded run and the padded one so far.
        natural_ulps: The same in ulp: what the step's kernels round without any graph.
    """

    def __init__(
        self,
        runner: Runner[Any, Any],
        batch: Any,
        padded_batch_size: int,
        start: StateSnapshot | None = None,
        *,
        tolerance: float = 1.0,
        padded_batch: Any = None,
        prepare: Callable[[], object] = lambda: None,
        read_state: Callable[[], Tensors] = dict,
    ) -> None:
        if start is None:
            start = StateSnapshot(restorable_state(runner), runner.device)
        self.runner, self.batch, self.start = runner, batch, start
        self.padded_batch_size = padded_batch_size
        self.padded_batch = batch if padded_batch is None else padded_batch
        self._prepare, self._read_state = prepare, read_state
        self._forcing = TeacherForcing(runner.step)
        self._owner = even_owner(batch.batch_size)
        self._last_padded: Tensors = {}
        self.rounding = Rounding(runner.sizes.dtype, tolerance)
        self.largest_difference = self.natural_ulps = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.start.restore()

    def replay(self, graph: CapturedGraph | None = None) -> Tensors:
        """Replay the runner's graph of the size, or another one that reads the runner's buffers.

        The runner does not count replays of another graph.
        """
        self.start.restore()
        self._prepare()
        batch, size = self.padded_batch, self.padded_batch_size
        if graph is None:
            return self._live_rows(self.runner.replay(batch, padded_batch_size=size))
        return self._live_rows(self.runner.make_replayer({size: graph}).replay(batch, size))

    def padded(self) -> Tensors:
        """Run the padded step without a graph."""
        self.start.restore()
        self._prepare()
        batch, size = self.padded_batch, self.padded_batch_size
        with self._forcing.record():
            output = self.runner.run_padded(batch, padded_batch_size=size)
        self._last_padded = self._live_rows(output)
        return self._last_padded

    def unpadded(self) -> Tensors:
        """Run the step on the live rows alone, without a graph."""
        self.start.restore()
        output: Output = self.runner.fall_back(self.batch)
        return output.clone().tensors()

    def padding_difference(self, allowed: Allowed | None = None) -> Mismatch | None:
        """Run the unpadded step, and return the first row of the last padded run that differs.

        If the step has several forwards, the field of a difference between them names the forward.

        Args:
            allowed: As for ``first_difference``; ``None`` allows the rounding of the step.
        """
        with self._forcing.force() as pairs:
            unpadded = self.unpadded()

        def compare(expected: Tensors, got: Tensors, owner: Any) -> Mismatch | None:
            limit = self.rounding.most if allowed is None else allowed
            return first_difference(expected, got, owner, self.rounding, limit)

        for own, recorded in ((pair.own, pair.recorded) for pair in pairs):
            difference = largest_difference(own, recorded)
            self.largest_difference = max(self.largest_difference, difference)
            self.natural_ulps = max(self.natural_ulps, largest_ulps(own, recorded, self.rounding))
        for step, pair in enumerate(pairs):
            mismatch = compare(pair.own, pair.recorded, pair.owner)
            if mismatch is not None:
                which = f" of step {step}" if len(pairs) > 1 else ""
                return replace(mismatch, field=f"{mismatch.field}{which}")
        return compare(unpadded, self._last_padded, self._owner)

    def first_node(self, weights: Weights = None) -> FirstNode | None:
        """Return the first node at which the padded step differs from the unpadded one."""
        live = range(self.batch.batch_size)
        places = RowPlaces(live, live, len(live), self.padded_batch_size)  # pads follow
        runs = self.padding_difference, self.padded
        return first_node(self.runner.step, runs, matched_rows(places), self.rounding, weights)

    def first_unstable_node(self, weights: Weights = None) -> FirstNode | None:
        """Return the first node at which two runs of the padded step differ."""
        runs = self.padded, self.padded
        return first_node(self.runner.step, runs, same_rows, self.rounding, weights)

    def graph_difference(self, padded: Tensors, replayed: Tensors) -> Mismatch | None:
        """Return the first row of a replay that differs from the padded run."""
        return first_difference(padded, replayed, self._owner, self.rounding)

    def judge_graph(self, padded: Tensors, replayed: Tensors) -> GraphVerdict:
        """Judge a replay that differs from its padded run, by repeating that run."""
        requests = self.batch.batch_size
        return judge_graph(padded, replayed, self.padded, requests, self.rounding)

    def _live_rows(self, output: Output) -> Tensors:
        """Return copies of the rows of the live batch, and of state."""
        tensors, live = output.clone().tensors(), self.batch.batch_size
        requests = self.padded_batch.batch_size
        if requests > live:
            tensors = {name: rows[: len(rows) * live // requests] for name, rows in tensors.items()}
        return {**tensors, **self._read_state()}


def live_sizes(table: SizeTable, size: int) -> list[int]:
    """Return the numbers of live requests to try at a captured size: all, or ends and middle."""
    most = min(size, table.max_batch_size)
    if most <= _TRY_ALL_UP_TO:
        return list(range(1, most + 1))
    smaller = max((other for other in table if other < size), default=0)
    return sorted({1, smaller + 1, most // 2, most - 1, most})


@dataclass(frozen=True, slots=True)
class Comparison:
    """Outcome of ``compare_runs``.

    Attributes:
        replayed: Live rows of the replay, by field.
        mismatches: Of the graph, of padding and of inputs that the forward writes, at most one
            each; if there is none, the first row that is not finite.
        largest_difference: Largest difference of floating-point numbers, allowed or not.
    """

    replayed: Tensors
    mismatches: tuple[Mismatch, ...]
    largest_difference: float


def compare_runs(
    runner: Runner[Any, Any],
    batch: Any,
    padded_batch_size: int,
    allowed: Allowed | None = None,
    *,
    tolerance: float = 1.0,
) -> Comparison:
    """Replay a batch, run it padded and unpadded, each time from the same state, and compare.

    The replay comes first, on buffers and graph memory as they are. It must agree with the padded
    run bit for bit, and the padded run with the unpadded one within rounding; see
    ``EqualStateRuns``. Restores state and random numbers.

    Args:
        runner: Captured.
        batch: The mode's inputs, with at least one live request.
        padded_batch_size: The captured size to run at.
        allowed: Largest difference between padded and unpadded numbers, see ``first_difference``;
            ``None`` allows rounding.
        tolerance: Multiple of the usual rounding that is allowed, see ``Rounding``.
    """
    with EqualStateRuns(runner, batch, padded_batch_size, tolerance=tolerance) as runs:
        replayed, watch = runs.replay(), ForwardWatch(runner.step, runner.device, with_ops=False)
        with watch.watching():
            padded = runs.padded()
        written = _input_mismatch(runner, runs, watch.writes)
        padding = runs.padding_difference(allowed)
        graph = runs.graph_difference(padded, replayed)
        if graph is not None:
            graph = runs.judge_graph(padded, replayed).wrong
        finite = None
        if graph is None and padding is None and written is None:
            finite = first_not_finite(replayed, even_owner(batch.batch_size))
    largest = max(runs.largest_difference, largest_difference(padded, replayed))
    found = {
        INPUT_WRITTEN: written, GRAPH_DIFFERS: graph, PADDING_LEAKS: padding, NOT_FINITE: finite
    }  # fmt: skip
    where = runner.mode.name, batch.batch_size, padded_batch_size
    return Comparison(replayed, located(found, *where), largest)


def located(
    found: Mapping[str, Mismatch | None], mode: str, batch_size: int, padded_batch_size: int
) -> tuple[Mismatch, ...]:
    """Return the mismatches that were found, by kind, with the batch that they belong to."""
    where: dict[str, Any] = {"batch_size": batch_size, "padded_batch_size": padded_batch_size}
    return tuple(
        replace(mismatch, kind=kind, mode=mode, **where)
        for kind, mismatch in found.items()
        if mismatch is not None
    )


def _input_mismatch(
    runner: Runner[Any, Any], runs: EqualStateRuns, writes: Sequence[InputWrite]
) -> Mismatch | None:
    """Return the first change of an input field by a forward, with the line that wrote it."""
    write = next(iter(writes), None)
    if write is None or write.change is None:
        return None
    origin = NodeOrigin()
    if runner.group is None:  # ranks may differ in what they found, and run forwards together
        watch = ForwardWatch(runner.step, runner.device)
        with watch.watching():
            runs.padded()
        origins = (other.origin for other in watch.writes if other.field == write.field)
        origin = next(origins, None) or origin
    return replace(write.change, module=origin.module, source=origin.source)
