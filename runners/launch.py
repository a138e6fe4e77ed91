"""Observation of replays: each launch passes through the observers of its runner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from graphkit.buffers import InputBuffers, StepInputs
from graphkit.errors import ReplayError
from graphkit.graphs import Backend
from graphkit.runners.outputs import Output
from graphkit.runners.replay_plan import ReplayPlan

OutputT = TypeVar("OutputT", bound=Output)


@dataclass(frozen=True, slots=True)
class Launch(Generic[OutputT]):
    """One replay, between the write of its batch and the launch of its graph.

    An observer calls it once, and returns its output: ``output = launch()``. Valid inside the
    observer, until another batch of the same runner is written.
    """

    _launch: Callable[[ReplayPlan, int, int, list[Any]], OutputT]
    _buffers: InputBuffers
    _backend: Backend
    _plan: ReplayPlan
    _entry: int
    _tokens: int
    _in_flight: list[Any]
    _claim: int

    @property
    def batch_size(self) -> int:
        """Number of live requests."""
        return self._plan.requests

    @property
    def padded_batch_size(self) -> int:
        """Captured size that runs."""
        return self._plan.padded_batch_size

    @property
    def num_tokens(self) -> int:
        """Number of live rows."""
        return self._tokens

    def read_batch(self) -> StepInputs:
        """Return a copy of the live batch, as the graph will read it.

        Waits for the device. Bound fields are left out.

        Raises:
            ReplayError: The launch is no longer valid.
        """
        self._check_valid()
        self._backend.wait_for_replays()
        return self._buffers.read(
            self._entry, self._plan.requests, self._tokens, self._plan.padded_batch_size
        )

    def __call__(self) -> OutputT:
        """Launch the graph and return the live rows of its output.

        Raises:
            ReplayError: The launch is no longer valid.
        """
        self._check_valid()
        self._buffers.mailbox.claims += 1
        return self._launch(self._plan, self._entry, self._tokens, self._in_flight)

    def _check_valid(self) -> None:
        if self._claim != self._buffers.mailbox.claims:
            raise ReplayError(
                "this launch is no longer valid: its observer has returned or launched it, or "
                "replayed another batch of the same runner. Call launch() once, inside the "
                "observer, and replay other batches with another runner."
            )
