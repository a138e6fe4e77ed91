"""Replays that start from equal state, so that their outputs differ only by what was varied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch

from graphkit.audit.pads.batch_variants import Requests
from graphkit.audit.pads.state_writes import WatchedState
from graphkit.graphs import StateSnapshot
from graphkit.runners import Runner
from graphkit.targets import CaptureTarget
from graphkit.verify import StepRuns
from graphkit.verify.comparison import restorable_state

Tensors = dict[str, torch.Tensor]
_SEED = 40
_POOLS = ("attention.kv_pool.", "attention.window_kv_pool.")


class Trials:
    """Replays of one captured runner, each from the same state and random numbers.

    A context manager, which restores both when it ends. Holds a copy of the state.

    Args:
        target: Makes the batches, and declares the state.
        runner: One of the target's, captured.

    Attributes:
        runner: As given.
        state: The declared state, compared with its copy.
        count: Number of replays by ``run``.
        draws: Whether a replay draws random numbers.

    Raises:
        ReplayError: The runner is not captured.
    """

    def __init__(self, target: CaptureTarget, runner: Runner[Any, Any]) -> None:
        self.runner, self.count, self.draws = runner, 0, False
        self._target = target
        full_batch = self.batch(runner.table.largest)
        # Plans of the attention backend stay: every replay must write those again.
        state = {
            name: tensor
            for name, tensor in restorable_state(runner).items()
            if name in (target.mutable_state or {}) or name.startswith(_POOLS)
        }
        self._start = StateSnapshot(state, runner.device)
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
        runs = StepRuns(self.runner, batch, size, self._start)
        runs.padded()
        runs.padding_difference()
        return runs.natural
