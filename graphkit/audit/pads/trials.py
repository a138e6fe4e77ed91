"""Replays that all begin alike, so that what differs in the end comes from what was varied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch

from graphkit.audit.pads.batch_variants import Requests
from graphkit.audit.pads.state import WatchedState
from graphkit.runners import Runner
from graphkit.targets import CaptureTarget

Tensors = dict[str, torch.Tensor]
_SEED = 40


class Trials:
    """Replays of one captured runner, each from the same state and random numbers.

    A context manager: at its end state, random numbers and shadow mode are as they were. Holds a
    copy of the declared state meanwhile.

    Attributes:
        runner: As given.
        state: The target's, under watch.
        count: How many replays were looked at.
        draws: Whether a replay draws random numbers.

    Raises:
        ReplayError: The runner is not captured.
    """

    def __init__(self, target: CaptureTarget, runner: Runner[Any]) -> None:
        self.runner, self.count = runner, 0
        self._target, self._shadow = target, runner.shadow
        self._random = _random_states(runner.device)
        self.draws = False
        whole = self.batch(runner.table.largest)
        self.state = WatchedState(target.mutable_state or {}, target.sizes.page_size, whole)

    def __enter__(self) -> Self:
        self.runner.shadow = None
        largest = self.runner.table.largest
        whole = self.batch(largest)
        self.leave(whole, largest)
        self.draws = not all(map(torch.equal, self._random, _random_states(self.runner.device)))
        self.state.learn(whole)
        return self

    def __exit__(self, *exc: object) -> None:
        self._rewind()
        self.runner.shadow = self._shadow

    def batch(self, live: int, which: int = 0) -> Any:
        """A live batch; another one for each ``which``."""
        return self._target.batch(self.runner.mode, live, _SEED + live + 1000 * which)

    def requests(self, live: int, which: int = 0) -> Requests:
        """The same, taken apart."""
        buffers = self.runner.buffers
        return Requests.of(self.batch(live, which), buffers.layouts, buffers.capacity)

    def leave(self, batch: Any, size: int) -> None:
        """Replay a batch at a captured size for what it leaves in state, inputs and graph memory.

        Every number among the inputs that a refresh has to write again becomes NaN.
        """
        self._rewind()
        self.runner.replay(batch, padded_batch_size=size)
        buffers = self.runner.buffers
        for name, rows in buffers.arena.tensors.items():
            if rows.is_floating_point() and name not in buffers.bound_fields:
                rows.fill_(torch.nan)

    def run(
        self, batch: Any, size: int, live: int, prepare: Callable[[], object] = lambda: None
    ) -> Tensors:
        """Replay a batch at a captured size; the output of its first requests.

        Args:
            batch: At least ``live`` requests.
            size: A captured size.
            live: How many requests to look at.
            prepare: Called when state is as it was.
        """
        self._rewind()
        prepare()
        output = self.runner.replay(batch, padded_batch_size=size, clone=True)
        self.count += 1
        requests = batch.batch_size
        return {
            name: rows[: len(rows) * live // requests] for name, rows in output.tensors().items()
        }

    def _rewind(self) -> None:
        self.state.restore()
        torch.set_rng_state(self._random[0])
        for state in self._random[1:]:
            torch.cuda.set_rng_state(state, self.runner.device)


def _random_states(device: torch.device) -> list[torch.Tensor]:
    """Of the CPU's generator, and of the device's if that is another one."""
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states
