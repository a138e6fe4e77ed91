"""A backend whose captures run on several ranks at once, and the barriers between its parts.

``torch.distributed.monitored_barrier`` names the ranks that are missing after its time limit. This
barrier ends as soon as a rank fails, and raises the cause of that rank on all of them.

``torch.cuda.graph`` captures on one rank. If another rank fails meanwhile, the collectives of the
capture wait for it; here each part of a capture begins and ends on all ranks.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from graphkit.distributed.connections import is_connection_error
from graphkit.distributed.guarded_calls import GuardedCalls
from graphkit.distributed.heartbeat import DRAIN_S
from graphkit.distributed.rank_store import Failure, failure_of_wait
from graphkit.errors import CaptureCause, ConfigError, RankError
from graphkit.graphs import Attribution, Backend, CapturedGraph, CaptureFailure, LoopGraph
from graphkit.graphs.capture_failure import as_capture_failure

logger = logging.getLogger(__name__)
ResultT = TypeVar("ResultT")


class RankFailure(CaptureFailure):
    """A failed capture of one rank, raised on all ranks; ``rank`` is that rank, if it is known."""

    is_shared = True

    def __init__(self, cause: CaptureCause, where: str, rank: int | None) -> None:
        super().__init__(cause, where)
        self.rank = rank


class CaptureBarrier:
    """Barriers of ranks that capture together: each rank continues when all have arrived.

    A barrier goes through the store of the process group and runs no tensor operation, so that
    ranks may wait during a capture.

    Raises:
        RankFailure: A rank failed, or did not arrive at a barrier within the time limit.
    """

    def __init__(self, group: GuardedCalls) -> None:
        self._group = group

    def compare(self, settings: Mapping[str, str]) -> None:
        """Refuse settings that differ between ranks.

        Raises:
            ConfigError: A setting differs; ``field`` names it.
            RankFailure: A rank did not arrive.
        """
        ours = dict(settings)
        for rank, theirs in enumerate(self._gather(ours)):
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
        """Report success, and wait until all other ranks have done so."""
        self._gather(None)

    def on_any(self, is_needed: bool) -> bool:
        """Wait for all ranks, and return whether any of them passes true."""
        return any(self._gather(is_needed))

    def broadcast_from_rank_0(self, value: float) -> float:
        """Wait for all ranks, and return the number that rank 0 passes."""
        return float(self._gather(value)[0])

    def run(self, function: Callable[[], ResultT]) -> ResultT:
        """Run a function on all ranks at once, and return when all have enqueued its work.

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
            The failure of the rank that failed first.
        """
        group = self._group
        group.begin_barrier()
        topic = failure_of_wait(group.waits)
        failure = group.store.failure(topic)
        if failure is None and (lost := self._lost(error)) is not None:
            failure = group.store.failure(topic)  # why another rank did not run the collective
            if failure is None:
                return _missing(lost)
        if failure is None:
            own = as_capture_failure(error)
            details, text = json.dumps([own.cause.name, own.where]), failure_text(group.rank, own)
            logger.warning("Reporting to the other ranks: %s", text)
            failure = group.store.report(topic, Failure((group.rank,), text, details=details))
        return _rank_failure(failure)

    def _lost(self, error: BaseException) -> RankError | None:
        """Return the failure that ended the group, if an error follows from one."""
        if isinstance(error, RankError):
            return error
        if isinstance(error, Exception) and is_connection_error(error):
            return self._group.failure_behind(error)
        return None

    def _gather(self, value: Any) -> list[Any]:
        """Wait for all ranks, and return the value of each, which JSON can hold."""
        group = self._group
        group.require_open()
        group.begin_barrier()
        number = group.waits
        text = json.dumps(value)
        texts = {group.rank: text}
        group.store.write(f"barrier {number}", text)

        def missing() -> list[int]:
            return [rank for rank in group.others if rank not in texts]

        def have_arrived(seconds: float) -> bool:
            texts.update(group.store.gather(f"barrier {number}", missing(), seconds))
            failure = group.store.failure(failure_of_wait(number)) if missing() else None
            if failure is not None:
                raise _rank_failure(failure)
            return not missing()

        try:
            group.wait_until(have_arrived, missing=missing)
        except RankError as error:
            raise _missing(error) from error
        return [json.loads(texts[rank]) for rank in range(group.size)]


def failure_text(rank: int | None, failure: CaptureFailure) -> str:
    """Return which rank failed in a capture, and why."""
    return f"rank {rank} failed in a capture: {failure}"


def _rank_failure(failure: Failure) -> RankFailure:
    name, where = json.loads(failure.details)
    return RankFailure(CaptureCause[name], where, failure.ranks[0])


def _missing(error: RankError) -> RankFailure:
    """Return the failure of a capture after a failure that ended the group."""
    rank = next(iter(error.ranks), None)
    return RankFailure(CaptureCause.MISSING_RANK, str(error).removesuffix("."), rank)


class BarrierBackend:
    """A backend whose warm-ups and captures run on all ranks at once. See ``Backend``.

    Every rank runs the same function, and no rank waits for the device before all have enqueued
    their part, so that a failure of one rank leaves none waiting. Every rank raises the failure of
    the first rank that failed. The settings must be the same on every rank.
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
        self.compiles_kernels = backend.compiles_kernels
        self.on_any_rank = self._barrier.on_any
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
