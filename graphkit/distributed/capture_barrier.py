"""Capture on several ranks at once: all wait for each other at barriers."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from graphkit.distributed.connections import is_connection_error
from graphkit.distributed.failure_detector import described
from graphkit.distributed.rank_group import RankGroup
from graphkit.distributed.rank_store import Failure
from graphkit.errors import CaptureCause, ConfigError, RankError
from graphkit.graphs import Attribution, Backend, CapturedGraph, CaptureFailure, LoopGraph
from graphkit.graphs.capture_failure import failure_of

ResultT = TypeVar("ResultT")
_SLICE_S = 0.25
"""How long a rank waits for another one before it looks whether a rank has failed."""


class RankFailure(CaptureFailure):
    """A failed capture of one rank, raised on all ranks; ``rank`` is that rank, if it is known."""

    def __init__(self, cause: CaptureCause, where: str, rank: int | None) -> None:
        super().__init__(cause, where)
        self.rank = rank


class CaptureBarrier:
    """Barriers of ranks that capture together: each goes on when all others have come.

    A barrier goes through the store of the process group and runs no tensor operation, so that
    ranks may wait during a capture.

    Args:
        group: The ranks.
    """

    def __init__(self, group: RankGroup) -> None:
        self._group = group

    def compare(self, settings: Mapping[str, str]) -> None:
        """Refuse settings that differ between ranks.

        Raises:
            ConfigError: A setting differs; ``field`` names it.
            RankFailure: A rank did not come.
        """
        texts = self._exchange(json.dumps(dict(settings)))
        ours = dict(settings)
        for rank in sorted(texts):
            theirs: dict[str, str] = json.loads(texts[rank])
            for name in [*ours, *theirs]:
                mine, other = ours.get(name, "nothing"), theirs.get(name, "nothing")
                if mine != other:
                    raise ConfigError(
                        f"ranks disagree on {name}: rank {self._group.rank} has {mine}, rank "
                        f"{rank} has {other}. Create the runner with the same settings on every "
                        "rank.",
                        field=name,
                    )

    def wait(self) -> None:
        """Say that all went well here, and wait until all others say so.

        Raises:
            RankFailure: A rank failed, or did not come within the time limit.
        """
        self._exchange("")

    def on_any(self, is_needed: bool) -> bool:
        """Wait for all ranks, and return whether any of them passes true.

        Raises:
            RankFailure: A rank has failed, or did not come within the time limit.
        """
        texts = self._exchange(json.dumps(is_needed)).values()
        return any([is_needed, *(json.loads(text) for text in texts)])

    def run(self, function: Callable[[], ResultT]) -> ResultT:
        """Start a function when all ranks do, and go on when all have enqueued its work.

        Raises:
            RankFailure: The function raised an exception on a rank; the first one, on all ranks.
        """
        self.wait()
        try:
            result = function()
        except Exception as error:
            raise self.fail(error) from error
        self.wait()
        return result

    def fail(self, error: BaseException) -> RankFailure:
        """Report a failure of this rank at the next barrier, without waiting for the others.

        Returns:
            The failure; that of another rank if it failed first, and this one only followed.
        """
        group, number = self._group, self._next()
        found = group.store.failure(_failure_at(number))
        if found is None and isinstance(error, RankError):
            return _missing(error)
        if found is None and isinstance(error, Exception) and is_connection_error(error):
            lost = group.failure_behind(error)
            found = group.store.failure(_failure_at(number))
            if found is None:
                return _missing(lost)
        if found is None:
            own = failure_of(error)
            text = f"rank {group.rank} failed in a capture: {described(own)}".removesuffix(".")
            where = json.dumps([own.cause.name, own.where])
            found = group.store.report(
                _failure_at(number), Failure((group.rank,), text, details=where)
            )
        return _rank_failure(found)

    def _next(self) -> int:
        self._group.barriers = number = self._group.barriers + 1
        self._group.advance(_failure_at(number + 1))
        return number

    def _exchange(self, text: str) -> dict[int, str]:
        """Write a text, wait for those of the other ranks, and return them."""
        group = self._group
        group.require_open()
        number = self._next()
        topic = f"barrier {number}"
        group.store.write(topic, text)
        deadline, found = time.monotonic() + group.time_limit, dict[int, str]()
        while missing := [rank for rank in group.others if rank not in found]:
            found |= group.store.gather(topic, missing, _SLICE_S)
            if len(found) == len(group.others):
                break
            failure = group.store.failure(_failure_at(number))
            if failure is not None:
                raise _rank_failure(failure)
            try:
                group.check()
            except RankError as error:
                raise _missing(error) from error
            if time.monotonic() > deadline:
                raise _missing(group.give_up([rank for rank in missing if rank not in found]))
        return found


def _failure_at(number: int) -> str:
    """Return the topic of failures that ranks report instead of coming to a barrier."""
    return f"barrier {number} failure"


def _rank_failure(failure: Failure) -> RankFailure:
    name, where = json.loads(failure.details)
    return RankFailure(CaptureCause[name], where, failure.ranks[0])


def _missing(error: RankError) -> RankFailure:
    """Return the failure of a capture whose group has lost a rank."""
    rank = error.ranks[0] if error.ranks else None
    return RankFailure(CaptureCause.MISSING_RANK, str(error).removesuffix("."), rank)


class LockstepBackend:
    """A backend whose warm-ups and captures run on all ranks at once. See ``Backend``.

    Every rank runs the same function, and no rank waits for the device before all have enqueued
    their part, so that a failure of one rank leaves none waiting. Every rank raises the failure of
    the first rank that failed.

    Args:
        backend: Backend of this rank.
        group: The ranks.
        settings: Settings that must be the same on every rank, by name.
    """

    def __init__(self, backend: Backend, group: RankGroup, settings: Mapping[str, str]) -> None:
        self._backend, self._group, self._settings = backend, group, settings
        self._barrier = CaptureBarrier(group)
        self.name, self.device, self.warm_ups = backend.name, backend.device, backend.warm_ups

    @property
    def loop_refusal(self) -> str:
        """Why ``loop`` is not available to these ranks, as a phrase; empty if it is."""
        return self._group.loop_refusal or self._backend.loop_refusal

    @contextmanager
    def session(self) -> Iterator[None]:
        """Compare the settings of all ranks, and end the block on all ranks alike.

        Raises:
            ConfigError: The ranks' settings differ.
            CaptureFailure: Another rank left the block with an error.
        """
        self._barrier.compare(self._settings)
        with self._group.watched_captures(), self._backend.session():
            try:
                self._connect()
                yield
                self._barrier.wait()
            except RankFailure:
                raise
            except BaseException as error:
                self._barrier.fail(error)
                raise

    def warm_up(self, function: Callable[[], Any]) -> None:
        """Run the function on all ranks; see ``Backend.warm_up``."""

        def together() -> None:
            try:
                self._barrier.run(function)
            except RankFailure:  # collectives that others do not run would never end
                self._group.release_device()
                raise

        self._reporting(lambda: self._backend.warm_up(together))

    def capture(
        self,
        function: Callable[[], Any],
        attribution: Attribution | None = None,
        before_replay: Callable[[], None] | None = None,
    ) -> CapturedGraph:
        """Capture the function on all ranks; see ``Backend.capture``."""

        def all_ready() -> None:
            if before_replay is not None:
                before_replay()
            self._barrier.wait()

        return self._reporting(
            lambda: self._backend.capture(
                lambda: self._barrier.run(function), attribution, all_ready
            )
        )

    def loop(
        self,
        prologue: Any,
        bodies: Sequence[Any],
        again: torch.Tensor,
        body: torch.Tensor,
    ) -> LoopGraph:
        """Build the loop on all ranks; see ``Backend.loop``."""
        build = partial(self._backend.loop, prologue, bodies, again, body)
        loop: LoopGraph = self._reporting(lambda: self._barrier.run(build))
        return loop

    def diagnose(self, function: Callable[[], Any]) -> None:
        """Do nothing: one rank alone cannot run the collectives of a function again."""

    def wait_for_replays(self) -> None:
        """See ``Backend.wait_for_replays``."""
        self._backend.wait_for_replays()

    def wait_for_device(self) -> None:
        """See ``Backend.wait_for_device``."""
        self._backend.wait_for_device()

    def check_device(self) -> None:
        """See ``Backend.check_device``."""
        self._backend.check_device()

    def _reporting(self, call: Callable[[], ResultT]) -> ResultT:
        """Call, and report a failure that the other ranks do not know."""
        try:
            return call()
        except RankFailure:
            raise
        except Exception as error:
            raise self._barrier.fail(error) from error

    def _connect(self) -> None:
        """Run a first collective, because a capture cannot set up a communicator."""
        if self.device.type == "cuda" and self._group.uses_nccl:
            dist.all_reduce(torch.zeros(1, device=self.device), group=self._group.process_group)
            torch.cuda.synchronize(self.device)
