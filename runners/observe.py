"""Observation of replays: each passes through the observers of its runner."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from graphkit.buffers import StepInputs
from graphkit.errors import ReplayError
from graphkit.runners.outputs import Output
from graphkit.runners.replayer import Replayer, ReplayPlan

OutputT = TypeVar("OutputT", bound=Output)


@dataclass(frozen=True, slots=True)
class ObservedReplay(Generic[OutputT]):
    """One replay, between the write of its batch and the launch of its graph.

    An observer calls it once, and returns its output: ``output = replay()``. Valid inside the
    observer, until another batch of the same runner is written.
    """

    _replayer: Replayer[OutputT]
    _launch: Callable[[ReplayPlan, int, int, list[Any]], OutputT]
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
            ReplayError: The replay is no longer valid.
        """
        self._check_valid()
        self._replayer.backend.wait_for_replays()
        return self._replayer.buffers.read(
            self._entry, self._plan.requests, self._tokens, self._plan.padded_batch_size
        )

    def __call__(self) -> OutputT:
        """Launch the graph and return the live rows of its output.

        Raises:
            ReplayError: The replay is no longer valid.
        """
        self._check_valid()
        self._replayer.buffers.mailbox.claims += 1
        return self._launch(self._plan, self._entry, self._tokens, self._in_flight)

    def _check_valid(self) -> None:
        if self._claim != self._replayer.buffers.mailbox.claims:
            raise ReplayError(
                "this replay is no longer valid: its observer has returned or called it, or "
                "replayed another batch of the same runner. Call it once, inside the observer, and "
                "replay other batches with another runner."
            )


@contextmanager
def observed(
    replayer: Replayer[OutputT], observer: Callable[[ObservedReplay[OutputT]], OutputT]
) -> Iterator[None]:
    """Pass every replay of a block through an observer; see ``Runner.observe``."""
    inner, mailbox = replayer.launch, replayer.buffers.mailbox

    def observe(plan: ReplayPlan, entry: int, tokens: int, in_flight: list[Any]) -> OutputT:
        replay = ObservedReplay(replayer, inner, plan, entry, tokens, in_flight, mailbox.claims)
        try:
            return observer(replay)
        finally:
            mailbox.claims += 1  # the replay ends with its observer

    replayer.launch = observe
    try:
        yield
    finally:
        replayer.launch = inner
