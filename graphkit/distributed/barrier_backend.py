"""A backend whose captures run on several ranks at once.

``torch.cuda.graph`` captures on one rank. If another rank fails meanwhile, the collectives of the
capture wait for it; here each part of a capture begins and ends on all ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from graphkit.distributed.capture_barrier import CaptureBarrier, RankFailure, failure_text
from graphkit.distributed.guarded_calls import GuardedCalls
from graphkit.distributed.heartbeat import DRAIN_S
from graphkit.graphs import Attribution, Backend, CapturedGraph, LoopGraph

ResultT = TypeVar("ResultT")


class BarrierBackend:
    """A backend whose warm-ups and captures run on all ranks at once. See ``Backend``.

    Every rank runs the same function, and no rank waits for the device before all have enqueued
    their part, so that a failure of one rank leaves none waiting. Every rank raises the failure of
    the first rank that failed.

    Args:
        backend: Backend of this rank.
        group: The ranks.
        settings: Settings that must be the same on every rank, by name.
        no_loop_reason: Reason why the ranks run no device loops, or an empty string.
    """

    def __init__(
        self,
        backend: Backend,
        group: GuardedCalls,
        settings: Mapping[str, str],
        no_loop_reason: str = "",
    ) -> None:
        self._backend, self._group, self._settings = backend, group, settings
        self._group_no_loop_reason = no_loop_reason
        self._barrier = CaptureBarrier(group)
        self.name, self.device, self.warm_ups = backend.name, backend.device, backend.warm_ups
        self.wait_for_replays = backend.wait_for_replays
        self.wait_for_device = backend.wait_for_device
        self.check_device = backend.check_device
        self.executable_bytes_per_node = backend.executable_bytes_per_node

    @property
    def no_loop_reason(self) -> str:
        """Reason why ``loop`` is not available to these ranks, or an empty string."""
        return self._group_no_loop_reason or self._backend.no_loop_reason

    @contextmanager
    def session(self) -> Iterator[None]:
        """Compare the settings of all ranks, and leave the block on all with the same result.

        Raises:
            ConfigError: The ranks' settings differ.
            CaptureFailure: Another rank left the block with an error.
        """
        self._barrier.compare(self._settings)
        with self._group.guard_captures(), self._backend.session():
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
            except RankFailure as failure:
                self._drain(failure)
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

        graph = self._reporting(
            lambda: self._backend.capture(
                lambda: self._barrier.run(function), attribution, all_ready
            )
        )
        self._group.graphs.add(graph)
        return graph

    def loop(self, *graphs: Any, **tensors: Any) -> LoopGraph:
        """Build the loop on all ranks; see ``Backend.loop`` for the arguments."""
        return self._reporting(
            lambda: self._barrier.run(lambda: self._backend.loop(*graphs, **tensors))
        )

    def measure(self, graph: Any) -> float:
        """Measure on all ranks at once, and return the result of rank 0 on all of them."""
        own = self._reporting(lambda: self._barrier.run(lambda: self._backend.measure(graph)))
        return self._barrier.broadcast_from_rank_0(own)

    def diagnose(self, function: Callable[[], Any]) -> None:
        """Do nothing: one rank alone cannot run the collectives of a function again."""

    def _reporting(self, call: Callable[[], ResultT]) -> ResultT:
        """Call a function, and report a failure that the other ranks do not know."""
        try:
            return call()
        except RankFailure:
            raise
        except Exception as error:
            raise self._barrier.fail(error) from error

    def _drain(self, failure: RankFailure) -> None:
        """Wait for the work on the current stream. Another rank may not run its part.

        Work that waits in NCCL for that rank does not end by itself. The group ends with the
        failure then, which aborts the work.
        """
        if self.device.type != "cuda":
            return
        stream, deadline = torch.cuda.current_stream(self.device), time.monotonic() + DRAIN_S
        while not _has_ended(stream):
            if not self._group.is_lost and time.monotonic() > deadline:
                ranks = () if failure.rank is None else (failure.rank,)
                self._group.fail(ranks, failure_text(failure.rank, failure))
            time.sleep(0.01)

    def _connect(self) -> None:
        """Run a first collective, because a capture cannot set up a communicator."""
        if self.device.type == "cuda" and self._group.uses_nccl:
            dist.all_reduce(torch.zeros(1, device=self.device), group=self._group.process_group)
            torch.cuda.synchronize(self.device)


def _has_ended(stream: torch.cuda.Stream) -> bool:
    """Return whether the work of a stream has ended, also with an error."""
    try:
        return stream.query()
    except RuntimeError:
        return True
