"""Capture on several ranks at once, in lockstep."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from graphkit.distributed.rank_group import RankGroup
from graphkit.errors import CaptureCause, ConfigError
from graphkit.graphs import Attribution, Backend, CapturedGraph, CaptureFailure, LoopGraph
from graphkit.graphs.capture_failure import failure_of

ResultT = TypeVar("ResultT")
_SLICE_S = 1.0
"""How long a rank waits for another one before it looks whether that one has left."""


class RankFailure(CaptureFailure):
    """A failed capture of one rank, raised on all ranks; ``rank`` is that rank."""

    def __init__(self, cause: CaptureCause, where: str, rank: int) -> None:
        super().__init__(cause, where)
        self.rank = rank


class Lockstep:
    """Meetings of ranks that capture together: each goes on when all others have come.

    A meeting goes through the store of the process group and runs no tensor operation, so that it
    may be held during a capture.

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
        texts = self._meet(json.dumps(dict(settings)))
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

    def arrive(self) -> None:
        """Say that all went well here, and wait until all others say so.

        Raises:
            RankFailure: A rank failed, or did not come within the time limit.
        """
        failures = [
            (report["at"], rank, report)
            for rank, text in self._meet("").items()
            if text and (report := json.loads(text))
        ]
        if failures:
            raise self._failure(*min(failures, key=lambda each: each[0])[1:])

    def on_any(self, is_needed: bool) -> bool:
        """Wait for all ranks, and return whether any of them passes true.

        Raises:
            RankFailure: A rank has left, or did not come within the time limit.
        """
        texts = self._meet(json.dumps(is_needed)).values()
        return any([is_needed, *(json.loads(text) for text in texts)])

    def fail(self, failure: CaptureFailure) -> RankFailure:
        """Report a failure of this rank at the next meeting, without waiting for the others.

        Returns:
            The failure; that of another rank if it failed first, and this one only followed.
        """
        report = {"at": time.time(), "cause": failure.cause.name, "where": failure.where}
        topic = self._next()
        self._group.notes.write(topic, json.dumps(report))
        for rank in self._group.others:
            text = self._group.notes.read(topic, rank)
            if text and json.loads(text)["at"] < report["at"]:
                return self._failure(rank, json.loads(text))
        return RankFailure(failure.cause, failure.where, self._group.rank)

    def _failure(self, rank: int, report: Mapping[str, Any]) -> RankFailure:
        return RankFailure(CaptureCause[report["cause"]], report["where"], rank)

    def _next(self) -> str:
        self._group.meetings += 1
        return f"meeting {self._group.meetings}"

    def _meet(self, text: str) -> dict[int, str]:
        """Leave a text, wait for those of the other ranks, and return them."""
        group = self._group
        group.require_open()
        topic = self._next()
        group.notes.write(topic, text)
        deadline, found = time.monotonic() + group.time_limit, dict[int, str]()
        while missing := [rank for rank in group.others if rank not in found]:
            self._check_left()
            seconds = min(deadline - time.monotonic(), _SLICE_S)
            if seconds <= 0:
                text = f"rank {missing[0]} did not come within {group.time_limit:g} s"
                group.notes.write("left", text)  # for that rank, if it comes after all
                raise self._lost(text, missing[0])
            found |= group.notes.gather(topic, missing, seconds)
        return found

    def _check_left(self) -> None:
        """Refuse to wait for a rank that has left, or that has given up waiting."""
        for rank in self._group.others:
            if left := self._group.notes.read("left", rank):
                raise self._lost(f"rank {rank} left the group after {left}", rank)

    def _lost(self, where: str, rank: int) -> RankFailure:
        self._group.lose(where, (rank,))
        return RankFailure(CaptureCause.MISSING_RANK, where, rank)


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
        self._lockstep = Lockstep(group)
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
        self._lockstep.compare(self._settings)
        self._connect()
        with self._backend.session():
            try:
                yield
                self._lockstep.arrive()
            except RankFailure:
                raise
            except BaseException as error:
                self._lockstep.fail(failure_of(error))
                raise

    def warm_up(self, function: Callable[[], Any]) -> None:
        """Run the function on all ranks; see ``Backend.warm_up``."""

        def together() -> None:
            try:
                self._run(function)
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
            self._lockstep.arrive()

        return self._reporting(
            lambda: self._backend.capture(lambda: self._run(function), attribution, all_ready)
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
        loop: LoopGraph = self._reporting(lambda: self._run(build))
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

    def _run(self, function: Callable[[], Any]) -> Any:
        """Start a function when all ranks do, and go on when all have enqueued its work."""
        self._lockstep.arrive()
        try:
            result = function()
        except Exception as error:
            raise self._lockstep.fail(failure_of(error)) from error
        self._lockstep.arrive()
        return result

    def _reporting(self, call: Callable[[], ResultT]) -> ResultT:
        """Call, and report a failure that the other ranks do not know."""
        try:
            return call()
        except RankFailure:
            raise
        except Exception as error:
            raise self._lockstep.fail(failure_of(error)) from error

    def _connect(self) -> None:
        """Run a first collective, because a capture cannot set up a communicator."""
        if self.device.type == "cuda" and self._group.uses_nccl:
            dist.all_reduce(torch.zeros(1, device=self.device), group=self._group.process_group)
            torch.cuda.synchronize(self.device)
