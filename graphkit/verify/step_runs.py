"""One step of a captured runner, run several times from the same state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from graphkit.graphs import CapturedGraph, StateSnapshot
from graphkit.records import Mismatch
from graphkit.runners import Output, Runner
from graphkit.verify.differences import (
    Allowed,
    Tensors,
    even_owner,
    first_difference,
    largest_difference,
    largest_ulps,
)
from graphkit.verify.first_node import FirstNode, first_node, padded_rows, same_rows
from graphkit.verify.rounding import Rounding
from graphkit.verify.teacher_forcing import TeacherForcing, first_mismatch

_REPEATS = 3
"""Repeated padded runs that decide whether a step is nondeterministic."""


@dataclass(frozen=True, slots=True)
class GraphVerdict:
    """Judgement of a replay that differs from its padded run, after repeated padded runs.

    Attributes:
        wrong: First row of the replay that is wrong; ``None`` if the graph is right.
        unstable: First row in which the padded runs differ from each other, if they do.
        is_comparable: Whether they differ by rounding at most.
    """

    wrong: Mismatch | None
    unstable: Mismatch | None
    is_comparable: bool


class StepRuns:
    """Runs a live batch with and without its graph, each time from the same state.

    - ``replay``: the graph.
    - ``padded``: the step that the graph was captured from, on the same shapes, without the graph.
      It runs the same kernels, so a replay must agree with it bit for bit. Where repeated padded
      runs differ, as sums in changing order do, the replay may differ like them.
    - ``padding_difference``: the step on the live rows alone. It may run other kernels, which round
      differently; beyond rounding, padding has changed live rows. It continues with the results of
      each forward of the last padded run, see ``teacher_forcing``.

    Runs return copies of the live rows, by field.

    Args:
        runner: Captured. No other batch may run meanwhile.
        batch: The mode's inputs with live rows.
        padded_batch_size: The captured size to run at.
        start: Restored before each run. The caller restores it after the last one.
        tolerance: Multiple of the usual rounding that is allowed, see ``Rounding``.
        padded_batch: The batch with pads of its own after the live rows, for padded runs.
        prepare: Called before each padded run, when state is restored.

    Attributes:
        batch, padded_batch_size, start: As given.
        rounding: Rounding of the runner's dtype.
        largest_difference: Largest difference between the unpadded run and the padded one so far.
        natural: The same in ulp: what the step's kernels round without any graph.
    """

    def __init__(
        self,
        runner: Runner[Any, Any],
        batch: Any,
        padded_batch_size: int,
        start: StateSnapshot,
        tolerance: float = 1.0,
        *,
        padded_batch: Any = None,
        prepare: Callable[[], object] = lambda: None,
    ) -> None:
        self._padded_batch, self._prepare = padded_batch or batch, prepare
        self.batch, self.padded_batch_size, self.start = batch, padded_batch_size, start
        self._runner = runner
        self._forcing = TeacherForcing(runner.step)
        self._owner = even_owner(batch.batch_size)
        self._last_padded: Tensors = {}
        self.rounding = Rounding(runner.sizes.dtype, tolerance)
        self.largest_difference = self.natural = 0.0

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
        replayer = self._runner.make_replayer({self.padded_batch_size: graph})
        output: Output = replayer.replay(self.batch, self.padded_batch_size)
        return output.clone().tensors()

    def padded(self) -> Tensors:
        """Run the padded step without a graph."""
        self.start.restore()
        self._prepare()
        batch = self._padded_batch
        with self._forcing.record():
            output: Output = self._runner.run_padded(
                batch, padded_batch_size=self.padded_batch_size
            )
        live, requests = self.batch.batch_size, batch.batch_size
        tensors = output.clone().tensors()
        if requests > live:
            tensors = {name: rows[: len(rows) * live // requests] for name, rows in tensors.items()}
        self._last_padded = tensors
        return self._last_padded

    def padding_difference(self, allowed: Allowed | None = None) -> Mismatch | None:
        """Run the unpadded step, and return the first row of the last padded run that differs.

        Args:
            allowed: As for ``first_difference``; ``None`` allows the rounding of the step.
        """
        self.start.restore()
        with self._forcing.force() as pairs:
            unpadded = self._runner.fall_back(self.batch).tensors()

        def compare(expected: Tensors, got: Tensors, owner: Any) -> Mismatch | None:
            limit = self.rounding.most if allowed is None else allowed
            return first_difference(expected, got, owner, self.rounding, limit)

        for pair in pairs:
            self._note(pair.own, pair.recorded)
        return first_mismatch(
            pairs, lambda pair: compare(pair.own, pair.recorded, pair.owner)
        ) or compare(unpadded, self._last_padded, self._owner)

    def first_node(
        self, weights: nn.Module | Mapping[str, torch.Tensor] | None = None
    ) -> FirstNode | None:
        """Return the first node at which the padded step differs from the unpadded one.

        Args:
            weights: The model, or its weights by name, to name modules by.
        """
        rows = padded_rows(self.batch.batch_size, self.padded_batch_size)
        runs = self.padding_difference, self.padded
        return first_node(self._runner.step, runs, rows, self.rounding, weights)

    def first_unstable_node(
        self, weights: nn.Module | Mapping[str, torch.Tensor] | None = None
    ) -> FirstNode | None:
        """Return the first node at which two runs of the padded step differ."""
        runs = self.padded, self.padded
        return first_node(self._runner.step, runs, same_rows, self.rounding, weights)

    def graph_difference(
        self, padded: Tensors, replayed: Tensors, allowed: float = 0.0
    ) -> Mismatch | None:
        """Return the first row of a replay that differs from the padded run.

        Args:
            padded: Output of the padded run.
            replayed: Output of the replay.
            allowed: Largest difference in ulp.
        """
        return first_difference(padded, replayed, self._owner, self.rounding, allowed)

    def judge_graph(self, padded: Tensors, replayed: Tensors) -> GraphVerdict:
        """Judge a replay that differs from the padded run, by repeating that run.

        If the repeated runs differ, too, the replay is wrong only if it differs by more than their
        rounding. If they differ beyond rounding, nothing can be compared, and any difference is
        reported.
        """
        repeated = [self.padded() for _ in range(_REPEATS)]
        differences = (self.graph_difference(padded, each) for each in repeated)
        unstable = next((each for each in differences if each is not None), None)
        if unstable is None:
            return GraphVerdict(self.graph_difference(padded, replayed), None, True)
        most = self.rounding.most
        if any(self.graph_difference(padded, each, most) is not None for each in repeated):
            return GraphVerdict(self.graph_difference(padded, replayed), unstable, False)
        natural = max(largest_ulps(padded, each, self.rounding) for each in repeated)
        wrong = self.graph_difference(padded, replayed, self.rounding.beside(natural))
        return GraphVerdict(wrong, unstable, True)

    def _note(self, expected: Tensors, got: Tensors) -> None:
        difference = largest_difference(expected, got)
        self.largest_difference = max(self.largest_difference, difference)
        self.natural = max(self.natural, largest_ulps(expected, got, self.rounding))
