"""Replays that start from equal state, so that their outputs differ only by what was varied."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Any, Self

import torch

from graphkit.audit.batch_variants import Requests
from graphkit.audit.bugs import Bug
from graphkit.audit.forward_caches import cache_at_fault
from graphkit.audit.padding_cause import Cause
from graphkit.audit.pads.state_writes import WatchedState
from graphkit.audit.undeclared_state import undeclared_tensors
from graphkit.graphs import StateSnapshot
from graphkit.runners import Runner
from graphkit.targets import CaptureTarget
from graphkit.verify import Rounding, StepRuns
from graphkit.verify.comparison import restorable_state
from graphkit.verify.differences import even_owner, first_difference
from graphkit.verify.first_node import (
    FirstNode,
    LiveRows,
    first_node,
    node_at,
    reordered_rows,
    same_rows,
)
from graphkit.verify.forward_trace import ForwardTrace, traced

Tensors = dict[str, torch.Tensor]
Previous = tuple[Any, int]
"""A batch, and the captured size to replay it at."""
_SEED = 40
_POOLS = ("attention.kv_pool.", "attention.window_kv_pool.")


class Trials:
    """Replays of one captured runner, each from the same state and random numbers.

    A context manager, which restores both when it ends. Holds a copy of the state, and of other
    tensors that the forward reaches.

    Args:
        target: Makes the batches, and declares the state.
        runner: One of the target's, captured.

    Attributes:
        runner: As given.
        state: The declared state, compared with its copy.
        count: Number of replays by ``run``.
        draws: Whether a replay draws random numbers.
        weights: The target's model, or its weights by name.

    Raises:
        ReplayError: The runner is not captured.
    """

    def __init__(self, target: CaptureTarget, runner: Runner[Any, Any]) -> None:
        self.runner, self.count, self.draws = runner, 0, False
        self._target, self.weights = target, target.weights
        full_batch = self.batch(runner.table.largest)
        # Plans of the attention backend stay: every replay must write those again.
        state = {
            name: tensor
            for name, tensor in restorable_state(runner).items()
            if name in runner.mutable_state or name.startswith(_POOLS)
        }
        self._start = StateSnapshot(state, runner.device)
        # Memory that no replay resets; a search for a node begins from what it is now.
        undeclared = undeclared_tensors(runner, target.weights)
        self._undeclared = StateSnapshot(undeclared, runner.device)
        self.state = WatchedState(
            self._start, target.sizes.page_size, full_batch, target.mutable_state or {}
        )

    def __enter__(self) -> Self:
        largest = self.runner.table.largest
        batch = self.batch(largest)
        self.leave(batch, largest)
        self.draws = self._start.drew_random_numbers()
        self.state.classify(batch)
        return self

    def __exit__(self, *exc: object) -> None:
        self._start.restore()

    def batch(self, live: int, which: int = 0) -> Any:
        """Return a live batch, a different one for each ``which``."""
        return self._target.batch(self.runner.mode, live, _SEED + live + 1000 * which)

    def requests(self, live: int, which: int = 0) -> Requests:
        """Return the requests of ``batch(live, which)``."""
        buffers = self.runner.buffers
        return Requests.of(self.batch(live, which), buffers.layouts, buffers.capacity)

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

    def run(
        self, batch: Any, size: int, live: int, prepare: Callable[[], object] = lambda: None
    ) -> Tensors:
        """Replay a batch at a captured size, and return the output of its first requests.

        Args:
            batch: At least ``live`` requests.
            size: A captured size.
            live: Number of requests to return.
            prepare: Called before the replay, when state is restored.
        """
        self._start.restore()
        prepare()
        output = self.runner.replay(batch, padded_batch_size=size, clone=True).tensors()
        self.count += 1
        return {name: rows[: len(rows) * live // batch.batch_size] for name, rows in output.items()}

    def natural_rounding(self, batch: Any, size: int) -> float:
        """Return the ulp by which the padded and the unpadded step differ without a graph."""
        runs = self.runs(batch, size)
        runs.padded()
        runs.padding_difference()
        return runs.natural

    def runs(self, batch: Any, size: int, **options: Any) -> StepRuns:
        """Return runs of a batch from the state of all replays; options as for ``StepRuns``."""
        return StepRuns(self.runner, batch, size, self._start, **options)

    def first_node_after(
        self, batch: Any, size: int, previous: tuple[Previous | None, Previous | None]
    ) -> FirstNode | None:
        """Return the first node of the padded step that depends on the batch before it.

        Args:
            batch: The batch.
            size: Captured size.
            previous: A batch to replay before, and its captured size, for each of two runs.
        """

        def run(before: Previous | None) -> None:
            if before is not None:  # without one, the runs differ by what the first one left
                self._undeclared.restore()
                self.leave(*before)
            self._start.restore()
            self.runner.run_padded(batch, padded_batch_size=size)

        runs = partial(run, previous[0]), partial(run, previous[1])
        return self._first_node(runs, same_rows)

    def cause_in_order(self, requests: Requests, order: Sequence[int], bug: Bug) -> Cause:
        """Return why rows of the step without a graph depend on the order of the requests.

        Args:
            requests: The requests.
            order: Another order of them.
            bug: Class of bug, unless a cache is at fault.
        """
        rounding = Rounding(self.runner.sizes.dtype)
        output: Tensors = {}

        def run(batch: Any) -> Tensors:
            self._start.restore()
            output.update(self.runner.fall_back(batch).clone().tensors())
            return {**output}

        def agrees() -> bool:
            expected, got = in_order(output, order), runs[1]()
            return first_difference(expected, got, even_owner(1), rounding, rounding.most) is None

        runs = partial(run, requests.batch()), partial(run, requests.take(order).batch())
        first = self._first_node(runs, reordered_rows(order, requests.tokens_of(order).tolist()))
        read = () if first is None else first.outside
        cache = cache_at_fault(self.runner, read, runs[0], agrees)
        return Cause(bug if cache is None else cache.bug, first, cache)

    def first_stray_write(
        self, batch: Any, size: int, previous: Previous | None, prepare: Callable[[], object]
    ) -> FirstNode | None:
        """Return the first node that writes a row of state that is not the batch's.

        Args:
            batch: The batch.
            size: Captured size.
            previous: A batch to replay before it, and the captured size of that.
            prepare: Called before the run, when state is restored.
        """
        if previous is not None:
            self.leave(*previous)
        for call in count():
            self._start.restore()
            prepare()
            strays: list[int] = []

            def look(trace: ForwardTrace, strays: list[int] = strays) -> None:
                is_outside = None in trace.ops[-1].values
                if not strays and is_outside and self.state.stray_write(batch) is not None:
                    strays.append(len(trace.ops) - 1)

            with traced(self.runner.step, call, self.weights, look) as trace:
                self.runner.run_padded(batch, padded_batch_size=size)
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
