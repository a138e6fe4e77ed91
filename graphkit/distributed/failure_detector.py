"""The first failure of a group: ranks report it, notice it, and end because of it.

torchrun ends all processes when one of them has ended, and torch's watchdog ends a process whose
NCCL collective exceeds its time limit. Neither gives the other ranks an exception, nor names the
rank that failed first; and the watchdog does not see collectives in graphs.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from graphkit.distributed.connections import (
    abort_nccl,
    break_gloo,
    is_open,
    new_cpu_group,
    num_collectives,
    rank_of_host,
    uses_nccl,
)
from graphkit.distributed.heartbeat import (
    DRAIN_S,
    INTERVAL_S,
    SILENT_S,
    Heartbeat,
    LivenessCheck,
    RankProgress,
    StallDetector,
    missing_ranks,
    write_heartbeat,
)
from graphkit.distributed.rank_store import FAILURE, Failure, RankStore
from graphkit.errors import RankError, ReplayError, first_line
from graphkit.graphs import CapturedGraph

logger = logging.getLogger(__name__)
_SLICE_S = 0.25
"""How long a rank waits for others before it looks at interrupts and failures.

A ``^C`` takes effect within this time; each look is one read of the store.
"""
_ABORT_S = DRAIN_S + INTERVAL_S + 0.5
"""Time after a failure within which NCCL has been aborted, or is being aborted."""
_GLOO_MARGIN_S = 60.0
"""Time that gloo's limit exceeds ``time_limit`` by, so that gloo does not time out while ranks find
out who is missing."""


class FailureDetector:
    """Finds out which rank of a group failed first, and ends the others.

    A rank that fails writes a ``Failure`` into the store before anything else, and the first one
    counts. A rank that is killed writes nothing, but its heartbeat stops and its connections close.
    A rank that does not arrive within the time limit is reported by the ranks that wait. All ranks
    then raise the same ``RankError``, and so does every later call.

    The thread of the heartbeat reads the failure while its rank waits in a collective, and ends the
    collective: with gloo at once, with NCCL after a while in which the work that is enqueued may
    end. The process groups cannot be used afterwards. With NCCL, errors are raised after that, so
    that their receiver can destroy the process group.

    Args:
        process_group: The process group whose collectives are in the forwards.
        rank: Rank of this process in it.
        time_limit: Seconds that a rank waits for another one.

    Attributes:
        process_group, rank, time_limit: As passed.
        size: Number of ranks.
        uses_nccl: Whether collectives of the process group run on CUDA devices, through NCCL.
        waits: Number of calls so far in which each rank waits for all others. It is the same on all
            ranks.
        control: A process group of the same ranks for the CPU.
        store: Texts and failures that ranks write for each other.
        graphs: Captured graphs of this rank, which are closed when NCCL is aborted.
    """

    def __init__(self, process_group: dist.ProcessGroup, rank: int, time_limit: float) -> None:
        self.process_group, self.rank = process_group, rank
        self.size, self.time_limit = process_group.size(), time_limit
        self.uses_nccl = uses_nccl(process_group)
        self.control = new_cpu_group(process_group, time_limit + _GLOO_MARGIN_S)
        self._cpu_groups = [self.control]
        store = self.control.get_group_store()
        self.store = RankStore(store, rank)
        self._host = rank_of_host(store, self.control)
        self.graphs: weakref.WeakSet[CapturedGraph] = weakref.WeakSet()
        self._failure: Failure | None = None
        self._has_raised = False
        self._aborted, self._abort_until = threading.Event(), 0.0
        self.waits = self._runs = 0
        self._topic: str | None = None
        """Topic of failures that end the call that this rank makes; ``None`` outside of calls. Set
        with ``waits`` and ``_runs`` by ``GuardedCalls``."""
        self._stalls = StallDetector(rank, self.others, time_limit)
        self._heartbeat = Heartbeat(self.store, self._on_beat)

    @property
    def others(self) -> list[int]:
        """All ranks but this one."""
        return [rank for rank in range(self.size) if rank != self.rank]

    @property
    def is_lost(self) -> bool:
        """Whether a rank has failed, so that every further call raises ``RankError``."""
        return self._failure is not None

    @property
    def has_raised(self) -> bool:
        """Whether a rank has failed, and this one has raised an error for it."""
        return self.is_lost and self._has_raised

    # Failures.

    def leave(self, error: BaseException) -> None:
        """Report that this rank leaves the group because of an error. Waits for no rank."""
        self._has_raised = True
        if self._failure is None and is_open(self.process_group):
            self.fail((self.rank,), f"rank {self.rank} left the group after {described(error)}")
        self._await_abort()

    def fail(self, ranks: tuple[int, ...], text: str) -> RankError:
        """Report a failure, of ranks if they are known, and return the error of the first one.

        Later calls raise that error.
        """
        return self._report(Failure(ranks, text))

    def require_open(self) -> None:
        """Refuse a group that was destroyed, or of which a rank has failed.

        Raises:
            RankError: A rank has failed.
            ReplayError: The process group was destroyed.
        """
        if self._failure is not None:
            raise self._error(self._failure)
        if not is_open(self.process_group):
            raise ReplayError(
                "the process group of this runner was destroyed. Close runners before "
                "torch.distributed.destroy_process_group."
            )

    def failure_behind(self, error: BaseException) -> RankError:
        """Return the failure that made a collective of this rank raise an error."""
        if self._failure is not None:
            return self._error(self._failure)
        is_late = "timed out" in str(error).lower()
        liveness = LivenessCheck(self.store, self.others)
        silent = liveness.wait(self._is_reported)
        behind = self._behind(liveness)
        if silent or self.store.is_gone or (behind and is_late):
            return self._report(self._missing(silent, behind))
        # The rank that closed the connection may be about to report why.
        deadline = time.monotonic() + SILENT_S
        while not (is_late or self._is_reported() or time.monotonic() > deadline):
            time.sleep(_SLICE_S / 10)
        return self.fail((), f"a collective of rank {self.rank} failed: {first_line(error)[:160]}")

    def new_cpu_group(self, seconds: float) -> dist.ProcessGroup:
        """Return a process group for the CPU, which ends when a rank fails. Collective."""
        cpu_group = new_cpu_group(self.process_group, seconds)
        self._cpu_groups.append(cpu_group)
        return cpu_group

    def end_collectives(self) -> None:
        """End gloo collectives of the process group at once, after a rank has failed."""
        break_gloo(self.process_group)

    # Waiting.

    def wait(self, work: Any, seconds: float | None = None) -> None:
        """Wait for a collective on the CPU; otherwise as ``wait_until``."""

        def has_ended(slice_s: float) -> bool:
            is_over = work.is_completed()
            try:
                work.wait(timedelta(seconds=slice_s))
            except RuntimeError as error:
                if is_over:
                    raise self.failure_behind(error) from error
                return False
            return True

        self.wait_until(has_ended, seconds)

    def wait_until(
        self,
        has_ended: Callable[[float], bool],
        seconds: float | None = None,
        missing: Callable[[], Sequence[int]] = tuple,
    ) -> None:
        """Wait for other ranks, or until one has failed.

        Args:
            has_ended: Waits for at most so many seconds, and returns whether all ranks arrived.
            seconds: Time limit; ``None`` for ``time_limit``.
            missing: Returns the ranks that have not arrived; by default the ranks that have made
                fewer calls than this one.

        Raises:
            RankError: A rank has failed, or did not arrive in time.
        """
        deadline = time.monotonic() + (self.time_limit if seconds is None else seconds)
        liveness: LivenessCheck | None = None
        while not has_ended(_SLICE_S):
            if self._is_reported():
                self.require_open()
            left = deadline - time.monotonic()
            if liveness is None and left < SILENT_S + _SLICE_S:
                liveness = LivenessCheck(self.store, self.others)
            if liveness is not None and left <= 0:
                silent = liveness.wait(self._is_reported)
                late = missing() or self._behind(liveness) or self.others
                raise self._report(self._missing([rank for rank in late if rank in silent], late))

    def _report(self, failure: Failure) -> RankError:
        first = self._failure
        if first is None:
            first = self._set_failure(self.store.report(FAILURE, failure))
            for cpu_group in self._cpu_groups:  # other ranks must not complete an agreement
                break_gloo(cpu_group)
            self._heartbeat.wake()
        return self._error(first)

    def _error(self, failure: Failure) -> RankError:
        self._has_raised = True
        self._await_abort()
        return failure.error(self.rank)

    def _await_abort(self) -> None:
        """Wait, after a failure, until NCCL has been aborted or is being aborted.

        ``destroy_process_group`` waits for an abort that has begun. An abort that begins while it
        runs frees communicators that are in use there, and NCCL raises an error. This method does
        not wait for the end of an abort, which may need the caller to destroy graphs of its own;
        see ``abort_nccl``.
        """
        if self.uses_nccl and is_open(self.process_group):
            self._aborted.wait(max(self._abort_until - time.monotonic(), 0))

    def _missing(self, silent: Sequence[int], late: Sequence[int]) -> Failure:
        """Return the failure of ranks that ended, or else of late ones."""
        if self.store.is_gone:
            return self._end_of_host()
        return missing_ranks(silent, late, self.time_limit)

    def _end_of_host(self) -> Failure:
        text = "the process that hosts the store of the process group ended"
        if self._host is None:
            return Failure((), f"{text}; it is not one of the ranks")
        return Failure((self._host,), f"rank {self._host} ended: {text}")

    def _progress(self) -> RankProgress:
        return RankProgress(self.waits, self._runs, num_collectives(self.process_group))

    def _behind(self, liveness: LivenessCheck) -> tuple[int, ...]:
        """Return the ranks that have made fewer calls than this one."""
        own = self._progress()
        return tuple(rank for rank, other in liveness.progress().items() if other < own)

    def _set_failure(self, failure: Failure) -> Failure:
        """Set the failure that ends this rank's calls, and return the one that was set first."""
        if self._failure is None:
            self._abort_until = time.monotonic() + _ABORT_S
            self._failure = failure
            text = failure.text.removesuffix(".")
            logger.warning("The group of rank %d failed: %s.", self.rank, text)
        return self._failure

    def _is_reported(self) -> bool:
        if self._failure is None:
            reported = self.store.failure(FAILURE)
            if reported is not None:
                self._set_failure(reported)
        return self._failure is not None

    # The thread of the heartbeat.

    def _on_beat(self, store: RankStore, number: int) -> bool:
        """Write a heartbeat, look for failures, and return whether to go on."""
        if not is_open(self.process_group):
            return False
        write_heartbeat(store, number, self._progress())
        failure = self._failure or store.failure(FAILURE)
        if failure is None:
            failure = self._stalls.failure(store, self._progress(), self._topic)
            failure = failure and store.report(FAILURE, failure)
        if failure is None and store.is_gone:
            failure = self._end_of_host()
        if failure is None:
            return True
        self._set_failure(failure)
        is_waiting = self._topic is not None
        for cpu_group in self._cpu_groups:
            break_gloo(cpu_group)
        if is_waiting:
            break_gloo(self.process_group)
        abort_nccl(self.process_group, DRAIN_S, self.graphs)
        self._aborted.set()
        return False


def described(error: BaseException) -> str:
    """Return the type and the message of an error."""
    return f"{type(error).__name__}: {error}".removesuffix(": ")
