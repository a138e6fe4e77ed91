"""The first failure of a group: how ranks report it, notice it, and end because of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from graphkit.distributed.connections import (
    break_gloo,
    hosts_store,
    is_connection_error,
    is_open,
    num_collectives,
    uses_nccl,
)
from graphkit.distributed.heartbeat import SILENT_S, Heartbeat, Progress, roll_call, write_beat
from graphkit.distributed.rank_store import Failure, RankStore, names_of_ranks
from graphkit.errors import GraphkitError, RankError, ReplayError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store  # torch.distributed.Store, without its stub

ResultT = TypeVar("ResultT")
_SLICE = timedelta(seconds=0.25)
"""How long a rank waits for others before it looks at interrupts and failures."""
_DRAIN_S = 2.0
"""How long work may take to end by itself after another rank has failed."""
_FAILURE = "failure"
_CALLS = 1000
"""Progress of a call in which all ranks wait, which makes up for other calls that differ."""


class FailureDetector:
    """Base of ``RankGroup``: finds out which rank failed first, and ends the others.

    A rank that fails writes a ``Failure`` into the store before anything else, and the first one
    counts. A rank that is killed writes nothing, but its heartbeat stops and its connections close.
    A rank that does not come within the time limit is reported by those that wait. All ranks then
    raise the same ``RankError``, and so does every later call.

    The thread of the heartbeat reads the failure while its rank waits in a collective, and breaks
    the connections that the collective uses: with gloo at once, with NCCL after a while in which
    the work that is enqueued may end. The process groups cannot be used afterwards.

    Args:
        process_group: The process group whose collectives are in the forwards.
        control: A process group of the same ranks for the CPU.
        rank: Rank of this process in it.
        time_limit: Seconds that a rank waits for another one.

    Attributes:
        process_group, rank, time_limit: As passed.
        size: Number of ranks.
        store: What ranks write for each other.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup,
        control: dist.ProcessGroup,
        rank: int,
        time_limit: float,
    ) -> None:
        self.process_group, self.rank = process_group, rank
        self.size, self.time_limit = process_group.size(), time_limit
        store = control.get_group_store()
        self.store = RankStore(store, rank)
        self._own_groups = [control]
        """Process groups that graphkit created."""
        self._host = _rank_of_host(store, control)
        self._failure: Failure | None = None
        self._has_raised = False
        self._progress, self._refusals = 0, 0
        self._has_agreed = False
        self._refused: BaseException | None = None
        self._watched: str | None = None
        """Topic of failures that end this rank while it waits in a call; ``None`` outside."""
        self._stuck: tuple[int, float] | None = None
        """Progress and time at which the heartbeat saw such a failure."""
        self._heartbeat = Heartbeat(self.store, self._on_beat)

    @property
    def others(self) -> list[int]:
        """All ranks but this one."""
        return [rank for rank in range(self.size) if rank != self.rank]

    @property
    def is_open(self) -> bool:
        """Whether the process group exists."""
        return is_open(self.process_group)

    @property
    def uses_nccl(self) -> bool:
        """Whether collectives of the process group run on CUDA devices, through NCCL."""
        return uses_nccl(self.process_group)

    @property
    def is_lost(self) -> bool:
        """Whether a rank has failed, so that every further call raises ``RankError``."""
        return self._failure is not None

    @property
    def is_known_lost(self) -> bool:
        """Whether a rank has failed and this one has raised an error since."""
        return self.is_lost and self._has_raised

    # Calls that all ranks make.

    def run(self, call: Callable[..., ResultT], *arguments: Any) -> ResultT:
        """Count a call that all ranks make, with collectives inside, and ``guard`` it."""
        self._progress += 1
        return self.guard(call, *arguments)

    def guard(self, call: Callable[..., ResultT], *arguments: Any) -> ResultT:
        """Call something that all ranks call in the same order.

        If it raises, the other ranks are told before this one goes on: they do not wait for the
        rest of the call. A ``GraphkitError`` before any of the call's collectives may be raised by
        all ranks alike; they can go on then.

        Raises:
            RankError: Another rank failed first.
            ReplayError: The process group was destroyed.
        """
        if self._watched is not None:  # part of such a call
            return call(*arguments)
        self.require_open()
        self._has_agreed, self._refused = False, None
        try:
            return self._guarded(call, *arguments)
        finally:
            self._watched = None  # again: an interrupt may have come before the other one

    def _guarded(self, call: Callable[..., ResultT], *arguments: Any) -> ResultT:
        try:
            self._watched = f"refusal {self._refusals + 1}"
            return call(*arguments)
        except BaseException as error:
            self._after(error)
            raise
        finally:
            self._watched = None

    @contextmanager
    def watched_captures(self) -> Iterator[None]:
        """End collectives of a block if another rank fails; see ``advance``."""
        outer, self._watched = self._watched, _FAILURE
        try:
            yield
        finally:
            self._watched = outer

    def advance(self, topic: str | None = None) -> None:
        """Count a call in which all ranks wait for each other.

        Args:
            topic: Failures under this topic end the collectives of ``watched_captures`` until the
                next call. ``None``: other ranks count on this one until the end of the call that is
                guarded, so that any exception is a failure.
        """
        self._progress += _CALLS - self._progress % _CALLS
        if topic is None:
            self._has_agreed, self._watched = True, _FAILURE
        elif self._watched is not None:
            self._watched = topic

    def leave(self, error: BaseException) -> None:
        """Tell the other ranks that this one takes no further part. Does not wait."""
        self._has_raised = True
        if self._failure is None and self.is_open:
            text = f"rank {self.rank} left the group after {described(error)}"
            self.lose(Failure((self.rank,), text))

    def fail(self, ranks: tuple[int, ...], what: str) -> RankError:
        """Report that ranks have failed, and return the error of the first failure.

        Args:
            ranks: The ranks.
            what: What they did, as the rest of a sentence without its full stop.
        """
        return self.lose(Failure(ranks, f"{names_of_ranks(ranks)} {what}"))

    def lose(self, failure: Failure) -> RankError:
        """Report a failure, and return the error of the first one, which later calls raise."""
        if self._failure is None:
            self._failure = self.store.report(_FAILURE, failure)
            for each in self._own_groups:  # other ranks must not agree with one that has left
                break_gloo(each)
            self._heartbeat.wake()
        return self._error(self._failure)

    def require_open(self) -> None:
        """Refuse a group that was destroyed, or of which a rank has failed.

        Raises:
            RankError: A rank has failed.
            ReplayError: The process group was destroyed.
        """
        if self._failure is not None:
            raise self._error(self._failure)
        if not self.is_open:
            raise ReplayError(
                "the process group of this runner was destroyed. Close runners before "
                "torch.distributed.destroy_process_group."
            )

    def check(self) -> None:
        """Raise the error of the first failure, if a rank has reported one.

        Raises:
            RankError: A rank has failed.
        """
        if self._failure is None:
            self._failure = self.store.failure(_FAILURE)
        if self._failure is not None:
            raise self._error(self._failure)

    # Waiting.

    def wait(self, work: Any, seconds: float | None = None) -> None:
        """Wait for a collective on the CPU, or until a rank has failed.

        Args:
            work: The collective.
            seconds: Time limit; ``None`` takes ``time_limit``.

        Raises:
            RankError: A rank has failed, or did not come in time.
        """
        deadline = time.monotonic() + (self.time_limit if seconds is None else seconds)
        while True:
            has_ended = work.is_completed()
            try:
                work.wait(_SLICE)
            except RuntimeError as error:
                if has_ended:
                    raise self.failure_behind(error) from error
                self.check()
                if time.monotonic() > deadline:
                    raise self.give_up() from error
            else:
                return

    def give_up(self, missing: Sequence[int] = ()) -> RankError:
        """Report ranks that did not come within the time limit, and return the error.

        Args:
            missing: These ranks; if empty, those that have made fewer calls than this one.
        """
        own = self._own_progress()
        silent, progress = roll_call(self.store, self.others, self._is_reported)
        behind = [rank for rank in self.others if progress[rank] < own]
        late = tuple(missing or behind or self.others)
        return self._lose_missing(tuple(rank for rank in late if rank in silent), late)

    def failure_behind(self, error: BaseException) -> RankError:
        """Return the failure because of which a collective of this rank failed.

        Args:
            error: What the collective raised.
        """
        if self._failure is not None:
            return self._error(self._failure)
        is_late = "timed out" in str(error).lower()
        own = self._own_progress()
        silent, progress = roll_call(self.store, self.others, self._is_reported)
        behind = tuple(rank for rank in self.others if progress[rank] < own)
        if silent or self.store.is_gone:
            return self._lose_missing(silent, ())
        if behind and is_late:
            return self._lose_missing((), behind)
        # Perhaps a rank that gave up closed the connection, and has yet to report why.
        deadline = time.monotonic() + SILENT_S
        while not (is_late or self._is_reported() or time.monotonic() > deadline):
            time.sleep(_SLICE.total_seconds() / 10)
        text = f"a collective of rank {self.rank} failed: {first_line(error)}"
        return self.lose(Failure((), text.removesuffix(".")))

    def end_waits(self) -> None:
        """Let collectives of gloo fail at once, after a rank has failed."""
        break_gloo(self.process_group)

    def release_device(self) -> None:
        """Abort NCCL collectives that wait on the current stream for a rank that does not come.

        Waits a moment for work that ends by itself. An aborted process group cannot be used again.
        """
        if not (self.is_open and self.uses_nccl):
            return
        deadline, stream = time.monotonic() + _DRAIN_S, torch.cuda.current_stream()
        while not _has_ended(stream):
            if time.monotonic() > deadline:
                self.process_group.abort()
                return
            time.sleep(0.01)

    # Failures.

    def _error(self, failure: Failure) -> RankError:
        self._has_raised = True
        return failure.error(self.rank)

    def _after(self, error: BaseException) -> None:
        """Report an exception of a call, or raise the failure of another rank that led to it."""
        if isinstance(error, RankError) or error is self._refused:
            return
        if isinstance(error, Exception) and is_connection_error(error):
            raise self.failure_behind(error) from error
        if isinstance(error, GraphkitError) and not self._has_agreed:
            # Ranks that refuse the call, too, go on. One that waits in it ends.
            self._refusals += 1
            self.store.report(f"refusal {self._refusals}", self.refusal(error))
        else:
            self.leave(error)

    def refusal(self, error: BaseException) -> Failure:
        """Return the failure of this rank that refuses a batch."""
        text = f"rank {self.rank} refused its batch: {described(error)}".removesuffix(".")
        return Failure((self.rank,), text)

    def _lose_missing(self, silent: Sequence[int], late: Sequence[int]) -> RankError:
        if self.store.is_gone:
            return self.lose(self._end_of_host())
        if silent:
            text = f"{names_of_ranks(silent)} ended: no heartbeat for {SILENT_S:g} s"
            return self.lose(Failure(tuple(silent), text))
        text = f"{names_of_ranks(late)} did not come within {self.time_limit:g} s"
        return self.lose(Failure(tuple(late), text, is_late=True))

    def _end_of_host(self) -> Failure:
        text = "the process that hosts the store of the process group ended"
        if self._host is None:
            return Failure((), f"{text}; it is none of the ranks")
        return Failure((self._host,), f"rank {self._host} ended: {text}")

    def _own_progress(self) -> Progress:
        return self._progress, num_collectives(self.process_group)

    def _is_reported(self) -> bool:
        return self._failure is not None or self.store.failure(_FAILURE) is not None

    # The thread of the heartbeat.

    def _on_beat(self, store: RankStore, number: int) -> bool:
        """Write a beat, look for failures, and return whether to go on."""
        if not self.is_open:
            return False
        write_beat(store, number, self._own_progress())
        failure = self._failure or store.failure(_FAILURE) or self._stuck_behind(store)
        if failure is None and store.is_gone:
            failure = self._end_of_host()
        if failure is None:
            return True
        self._failure = self._failure or failure
        is_waiting = self._watched is not None
        for each in self._own_groups:
            break_gloo(each)
        if is_waiting:
            break_gloo(self.process_group)
        with suppress(RuntimeError, ValueError, AssertionError):  # it may be destroyed meanwhile
            if self.uses_nccl:
                time.sleep(_DRAIN_S)
                self.process_group.abort()
        return False

    def _stuck_behind(self, store: RankStore) -> Failure | None:
        """Return a failure of another rank for which this one has waited in a call for a while."""
        topic, progress, now = self._watched, self._progress, time.monotonic()
        failure = None if topic is None else store.failure(topic)
        if failure is None:
            self._stuck = None
        elif self._stuck is None or self._stuck[0] != progress:
            self._stuck = progress, now
        elif now - self._stuck[1] > _DRAIN_S:
            return store.report(_FAILURE, failure)
        return None


def _rank_of_host(store: Store, control: dist.ProcessGroup) -> int | None:
    """Return the rank that hosts the store, if one does. Collective."""
    host = torch.tensor([control.rank() + 1 if hosts_store(store) else 0])
    dist.all_reduce(host, dist.ReduceOp.MAX, group=control)
    return int(host) - 1 if host else None


def _has_ended(stream: torch.cuda.Stream) -> bool:
    """Return whether the work of a stream has ended, also with an error."""
    try:
        return stream.query()
    except RuntimeError:
        return True


def first_line(error: BaseException) -> str:
    """Return the first line of a message, shortened."""
    return next(iter(str(error).splitlines()), "")[:160]


def described(error: BaseException) -> str:
    """Return the type and the message of an error."""
    return f"{type(error).__name__}: {error}".removesuffix(": ")
