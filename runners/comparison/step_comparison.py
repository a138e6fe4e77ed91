"""Comparison of the replay of one batch with the same step without a graph and without padding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from graphkit.buffers import Axis
from graphkit.graphs import StateSnapshot
from graphkit.graphs.snapshot import restore_problem
from graphkit.records import Mismatch
from graphkit.runners.comparison.differences import (
    Rounding,
    Tensors,
    even_owner,
    first_difference,
    largest_ulps,
)
from graphkit.runners.runner import Runner

SEED = 40
"""Seed of the batches and requests that checks and audits draw. Any number serves."""


def restorable_state(runner: Runner[Any, Any]) -> dict[str, Any]:
    """Return the declared state and the attention backend's tensors that a snapshot can restore."""
    state = runner.memory_names()["state"]
    return {name: tensor for name, tensor in state.items() if not restore_problem(tensor)}


GRAPH_DIFFERS = "the graph differs from the same padded path without it"
"""Kind of a mismatch between a replay and the padded step without a graph."""
PADDING_LEAKS = "padding changes live rows"
"""Kind of a mismatch between the padded and the unpadded step."""
INPUT_WRITTEN = "the forward writes into its inputs"
"""Kind of a mismatch between an input field before and after a forward."""
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


def judge_graph(
    padded: Tensors,
    replayed: Tensors,
    run_padded: Callable[[], Tensors],
    requests: int,
    rounding: Rounding,
) -> GraphVerdict:
    """Judge a replay that differs from its padded run, by repeating that run.

    If the repeated runs differ, too, the replay is wrong only if it differs by more than their
    rounding. If they differ beyond rounding, nothing can be compared, and any difference is
    reported.

    Args:
        padded: Output of the padded run.
        replayed: Output of the replay.
        run_padded: Runs the padded step again, from the same state.
        requests: Live requests.
        rounding: Rounding of the step.
    """

    def difference(got: Tensors, allowed: float = 0.0) -> Mismatch | None:
        return first_difference(padded, got, even_owner(requests), rounding, allowed)

    repeated = [run_padded() for _ in range(_REPEATS)]
    unstable = next((one for one in map(difference, repeated) if one is not None), None)
    if unstable is None:
        return GraphVerdict(difference(replayed), None, True)
    if any(difference(run, rounding.most) is not None for run in repeated):
        return GraphVerdict(difference(replayed), unstable, False)
    natural = max(largest_ulps(padded, run, rounding) for run in repeated)
    return GraphVerdict(difference(replayed, rounding.beside(natural)), unstable, True)


class StepComparison:
    """Runs a batch with and without its graph, each time from the same state, and compares.

    The replay comes first, on buffers and graph memory as they are. It must agree with the padded
    run bit for bit, or as padded runs agree with each other, and the padded run with the unpadded
    one within rounding. Steps of several forwards need ``graphkit.audit.runs``, since rounding may
    choose other tokens between them.

    Args:
        runner: Captured, with one forward per step.
        batch: The mode's inputs, with at least one live request.
        padded_batch_size: The captured size to run at.
        rounding: Rounding of the step.
    """

    def __init__(
        self, runner: Runner[Any, Any], batch: Any, padded_batch_size: int, rounding: Rounding
    ) -> None:
        self._runner, self._batch, self._size = runner, batch, padded_batch_size
        self._rounding = rounding
        self._start = StateSnapshot(restorable_state(runner), runner.device)

    def first_mismatch(self) -> Mismatch | None:
        """Return the first mismatch of inputs, of the graph or of padding. Restores state."""
        requests = self._batch.batch_size
        with self._start:
            replayed = self._run(self._runner.replay, padded_batch_size=self._size)
            padded = self._padded()
            if (written := self._written_input()) is not None:
                return replace(written, kind=INPUT_WRITTEN)
            if first_difference(padded, replayed, even_owner(requests), self._rounding):
                verdict = judge_graph(padded, replayed, self._padded, requests, self._rounding)
                if verdict.wrong is not None:
                    return replace(verdict.wrong, kind=GRAPH_DIFFERS)
            unpadded = self._run(self._runner.fall_back)
        leaked = first_difference(
            unpadded, padded, even_owner(requests), self._rounding, self._rounding.most
        )
        return None if leaked is None else replace(leaked, kind=PADDING_LEAKS)

    def _padded(self) -> Tensors:
        return self._run(self._runner.run_padded, padded_batch_size=self._size)

    def _run(self, call: Callable[..., Any], **size: int) -> Tensors:
        self._start.restore()
        return call(self._batch, **size).clone().tensors()  # type: ignore[no-any-return]

    def _written_input(self) -> Mismatch | None:
        """Return the first row of the buffers that is not that of the batch after a padded run."""
        requests, tokens = self._batch.batch_size, self._batch.num_tokens
        view, capacity = self._runner.buffers.view(self._size), self._runner.buffers.capacity
        expected, got = {}, {}
        for layout in self._runner.buffers.layouts:
            name, rows = layout.name, capacity.rows(layout.field.axis, requests, tokens)
            value = getattr(self._batch, name, None)
            if value is not None and layout.field.axis is not Axis.NONE:
                expected[name] = torch.as_tensor(value).to(self._runner.device)
                got[name] = getattr(view, name)[:rows]
        return first_difference(expected, got, even_owner(requests), self._rounding)
