"""One step of a captured runner, run several times from the same state."""

from __future__ import annotations

from typing import Any

from graphkit.graphs import CapturedGraph, StateSnapshot
from graphkit.records import Mismatch
from graphkit.runners import Output, Runner
from graphkit.verify.differences import (
    Allowed,
    Tensors,
    even_owner,
    first_difference,
    largest_difference,
    tolerance,
)
from graphkit.verify.teacher_forcing import TeacherForcing, first_mismatch


class StepRuns:
    """Runs a live batch with and without its graph, each time from the same state.

    - ``replay``: the graph.
    - ``padded``: the step that the graph was captured from, on the same shapes, without the graph.
      It runs the same kernels, so a replay must agree with it bit for bit.
    - ``padding_difference``: the step on the live rows alone. It may run other kernels, which round
      differently; beyond a tolerance, padding has changed live rows. It continues with the results
      of each forward of the last padded run, see ``teacher_forcing``.

    Runs return copies of the live rows, by field.

    Args:
        runner: Captured. No other batch may run meanwhile.
        batch: The mode's inputs with live rows.
        padded_batch_size: The captured size to run at.
        start: Restored before each run. The caller restores it after the last one.

    Attributes:
        batch, padded_batch_size, start: As given.
        largest_difference: Largest difference between the unpadded run and the padded one so far.
    """

    def __init__(
        self, runner: Runner[Any, Any], batch: Any, padded_batch_size: int, start: StateSnapshot
    ) -> None:
        self.batch, self.padded_batch_size, self.start = batch, padded_batch_size, start
        self._runner = runner
        self._forcing = TeacherForcing(runner.step)
        self._owner = even_owner(batch.batch_size)
        self.largest_difference = 0.0

    def replay(self) -> Tensors:
        """Replay the runner's graph."""
        self.start.restore()
        output: Output = self._runner.replay(
            self.batch, padded_batch_size=self.padded_batch_size, clone=True
        )
        return output.tensors()

    def replay_of(self, graph: CapturedGraph) -> Tensors:
        """Replay another graph of that size, which reads the runner's buffers.

        The runner does not count the replay.
        """
        self.start.restore()
        replayer = self._runner.replayer_of({self.padded_batch_size: graph})
        output: Output = replayer.replay(self.batch, self.padded_batch_size)
        return output.clone().tensors()

    def padded(self) -> Tensors:
        """Run the padded step without a graph."""
        self.start.restore()
        with self._forcing.record():
            output: Output = self._runner.run_padded(
                self.batch, padded_batch_size=self.padded_batch_size
            )
        return output.clone().tensors()

    def padding_difference(
        self, padded: Tensors, allowed: Allowed | None = None
    ) -> Mismatch | None:
        """Run the unpadded step, and return the first row of the padded run that differs from it.

        Args:
            padded: Output of the last padded run.
            allowed: As for ``first_difference``; ``None`` allows ``tolerance``.
        """
        self.start.restore()
        with self._forcing.force() as pairs:
            unpadded = self._runner.fall_back(self.batch).tensors()

        def compare(expected: Tensors, got: Tensors, owner: Any) -> Mismatch | None:
            limit = tolerance(expected) if allowed is None else allowed
            return first_difference(expected, got, limit, owner)

        for pair in pairs:
            self._note(pair.own, pair.recorded)
        return first_mismatch(
            pairs, lambda pair: compare(pair.own, pair.recorded, pair.owner)
        ) or compare(unpadded, padded, self._owner)

    def graph_difference(
        self, padded: Tensors, replayed: Tensors, allowed: Allowed = 0.0
    ) -> Mismatch | None:
        """Return the first row of a replay that differs from the padded run."""
        return first_difference(padded, replayed, allowed, self._owner)

    def _note(self, expected: Tensors, got: Tensors) -> None:
        difference = largest_difference(expected, got)
        self.largest_difference = max(self.largest_difference, difference)
