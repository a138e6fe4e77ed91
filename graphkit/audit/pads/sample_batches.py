"""Sample batches of a target, and runs of them that all begin from one state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Any, Self

import torch

from graphkit.audit.batch_variants import Requests
from graphkit.audit.finding_kinds import FindingKind
from graphkit.audit.padding_cause import Cause, cache_at_fault
from graphkit.audit.pads.state_writes import WatchedState
from graphkit.audit.runs.equal_state_runs import EqualStateRuns
from graphkit.audit.runs.first_node import FirstNode, first_node, node_at
from graphkit.audit.runs.forward_trace import ForwardTrace, traced
from graphkit.audit.runs.live_rows import LiveRows, RowPlaces, matched_rows, same_rows
from graphkit.audit.undeclared_state import undeclared_tensors
from graphkit.graphs import StateSnapshot
from graphkit.runners import Runner
from graphkit.runners.comparison import Rounding
from graphkit.runners.comparison.differences import Tensors, even_owner, first_difference
from graphkit.runners.comparison.step_comparison import SEED, restorable_state
from graphkit.runners.targets import CaptureTarget

Previous = tuple[Any, int]
"""A batch, and the captured size to replay it at."""
_POOLS = ("attention.kv_pool.", "attention.window_kv_pool.")


class SampleBatches:
    """Draws batches for a captured runner, and runs them from the same state and random numbers.

    A context manager, which restores both when it ends. Holds a copy of the state, and of other
    tensors that the forward reaches, see ``undeclared_tensors``.

    Attributes:
        state: The declared state, compared with its copy.
        draws: Whether a replay draws random numbers.
        weights: The target's model, or its weights by name.

    Raises:
        ReplayError: The runner is not captured.
    """

    def __init__(self, target: CaptureTarget, runner: Runner[Any, Any]) -> None:
        self.runner, self.draws = runner, False
        self._target, self.weights = target, target.weights
        # Plans of the attention backend stay: every replay must write those again.
        state = {
            name: tensor
            for name, tensor in restorable_state(runner).items()
            if name in runner.mutable_state or name.startswith(_POOLS)
        }
        self._start = StateSnapshot(state, runner.device)
        # Memory that no replay resets; a search for a node begins from what it is now.
        undeclared, _ = undeclared_tensors(runner, target.weights)
        self._undeclared = StateSnapshot(undeclared, runner.device)
        self.state = WatchedState(
            self._start,
            target.sizes.page_size,
            self.draw(runner.table.largest),
            target.mutable_state or {},
        )

    def __enter__(self) -> Self:
        largest = self.runner.table.largest
        batch = self.draw(largest)
        self.leave(batch, largest)
        self.draws = self._start.drew_random_numbers()
        self.state.classify(batch)
        return self

    def __exit__(self, *exc: object) -> None:
        self._start.restore()

    def draw(self, live: int, variant: int = 0) -> Any:
        """Return a batch of ``live`` requests, a different one for each variant."""
        return self._target.batch(self.runner.mode, live, SEED + live + 1000 * variant)

    def requests(self, live: int, variant: int = 0) -> Requests:
        """Return the requests of ``draw(live, variant)``."""
        buffers = self.runner.buffers
        return Requests.from_batch(self.draw(live, variant), buffers.layouts, buffers.capacity)

    def runs(self, batch: Any, size: int, **options: Any) -> EqualStateRuns:
        """Return runs of a batch at a captured size; options as for ``EqualStateRuns``."""
        return EqualStateRuns(self.runner, batch, size, self._start, **options)

    def leave(self, batch: Any, size: int) -> None:
        """Replay a batch for the values that it leaves in state, inputs and graph memory.

        Fills floating-point inputs with NaN; every replay must write those again.
        """
        self._start.restore()
        self.runner.replay(batch, padded_batch_size=size)
        buffers = self.runner.buffers
        for name, rows in buffers.arena.tensors.items():
            if rows.is_floating_point() and name not in buffers.bound_fields:
                rows.fill_(torch.nan)

    def first_node_after(
        self, runs: EqualStateRuns, previous: tuple[Previous, Previous]
    ) -> FirstNode | None:
        """Return the first node of the padded step that differs after two other batches."""

        def run(before: Previous) -> None:
            self._undeclared.restore()
            self.leave(*before)
            runs.padded()

        return self._first_node((partial(run, previous[0]), partial(run, previous[1])), same_rows)

    def cause_in_order(
        self, requests: Requests, order: Sequence[int], size: int, kind: FindingKind
    ) -> Cause:
        """Return why rows of the step without a graph depend on the order of the requests.

        Runs nothing on several ranks, where only one of them may see the difference.
        """
        if self.runner.group is not None:
            return Cause(kind)
        usual, reordered = (
            self.runs(part.batch(), size).unpadded for part in (requests, requests.take(order))
        )
        output: dict[str, torch.Tensor] = {}
        rounding = Rounding(self.runner.sizes.dtype)

        def agrees() -> bool:
            expected, got = in_order(output, order), reordered()
            return first_difference(expected, got, even_owner(1), rounding, rounding.most) is None

        tokens = requests.token_rows(order).tolist()
        places = map(RowPlaces.in_order, (order, tokens))
        first = self._first_node((usual, reordered), matched_rows(*places))
        read = () if first is None else first.outside
        cache = cache_at_fault(self.runner, read, lambda: output.update(usual()), agrees)
        return Cause(kind if cache is None else cache.kind, first, cache)

    def first_stray_write(
        self, runs: EqualStateRuns, previous: Previous | None
    ) -> FirstNode | None:
        """Return the first node that writes a row of state that is not the batch's."""
        if previous is not None:
            self.leave(*previous)
        strays: list[int] = []

        def look(trace: ForwardTrace) -> None:
            is_outside = None in trace.ops[-1].values
            if not strays and is_outside and self.state.stray_write(runs.padded_batch):
                strays.append(len(trace.ops) - 1)

        for call in count():
            with traced(self.runner.step, call, self.weights, look) as trace:
                runs.padded()
            if strays:
                return node_at(trace, strays[0], call)
            if not trace.ops:
                break
        return None

    def _first_node(
        self, runs: tuple[Callable[[], object], Callable[[], object]], rows: LiveRows
    ) -> FirstNode | None:
        rounding = Rounding(self.runner.sizes.dtype)
        return first_node(self.runner.step, runs, rows, rounding, self.weights)


def in_order(output: Tensors, order: Sequence[int]) -> Tensors:
    """Return copies of output rows with the requests in another order."""
    return {
        name: rows.unflatten(0, (len(order), -1))[list(order)].flatten(0, 1)
        for name, rows in output.items()
    }
