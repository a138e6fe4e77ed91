"""Calls that all ranks of a group make in the same order, and what a failure in one ends.

In torch an exception of one rank leaves the others waiting in their next collective.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from graphkit.distributed.connections import is_connection_error
from graphkit.distributed.failure_detector import FailureDetector, described
from graphkit.distributed.rank_store import FAILURE, Failure, failure_of_wait
from graphkit.errors import GraphkitError, RankError, ReplayError

ResultT = TypeVar("ResultT")
_KNOWN = "known"
"""Topic of a call whose failure all ranks know, so that nothing is reported under it."""


class GuardedCalls(FailureDetector):
    """Base of ``RankGroup``: reports failures of calls, and counts the calls.

    A failure ends the group, or the call alone: a rank that refuses a call before it waits for
    other ranks reports that under the topic of the call, and the others end with an error if they
    wait in it. The ranks can go on with the next call.
    """

    _refusals = 0
    """Calls that this rank has refused."""

    def run(self, call: Callable[..., ResultT], *arguments: Any) -> ResultT:
        """Count a call that all ranks make, with collectives inside, and ``guard`` it.

        The end counts, too: the device of a rank whose call has ended may wait for another rank
        whose call has not.
        """
        self._runs += 1
        result = self.guard(call, *arguments)
        self._runs += 1
        return result

    def guard(self, call: Callable[..., ResultT], *arguments: Any) -> ResultT:
        """Call a function that all ranks call in the same order.

        If it raises an exception, this rank reports that first, so that no other rank waits for the
        rest of the call. Before the first wait for other ranks, a ``GraphkitError`` fails the call
        alone; see the class.

        Raises:
            RankError: Another rank has failed. Results that an aborted collective left are dropped.
            ReplayError: The process group was destroyed.
        """
        if self._topic is not None:  # part of such a call
            return call(*arguments)
        self.require_open()
        try:
            try:
                self._topic = f"refusal {self._refusals + 1}"
                result = call(*arguments)
            except BaseException as error:
                self._after(error)
                raise
            finally:
                self._topic = None
        finally:
            self._topic = None  # again: an interrupt may have prevented the other assignment
        if self._failure is not None:
            raise self._error(self._failure)
        return result

    def begin_wait(self) -> None:
        """Count a call in which each rank waits for all others.

        They rely on this rank until the end of the guarded call: any exception ends the group.
        """
        self.waits, self._runs, self._topic = self.waits + 1, 0, FAILURE

    def begin_barrier(self) -> None:
        """Count a barrier of a capture; see ``guard_captures``."""
        self.waits, self._runs = self.waits + 1, 0
        if self._topic is not None:
            self._topic = failure_of_wait(self.waits + 1)

    def end_refusal(self) -> None:
        """Do not report the exception of this call: all ranks know why it fails."""
        self._topic = _KNOWN

    @contextmanager
    def guard_captures(self) -> Iterator[None]:
        """End collectives of a block that wait for a rank that fails before its next barrier.

        The block reports its own failures, under ``failure_of_wait`` of the next barrier.
        """
        outer, self._topic = self._topic, FAILURE
        try:
            yield
        finally:
            self._topic = outer

    def refusal(self, error: BaseException) -> Failure:
        """Return the failure of this rank that refuses a batch."""
        return Failure((self.rank,), f"rank {self.rank} refused its batch: {described(error)}")

    def _after(self, error: BaseException) -> None:
        """Report an exception of a call, or raise the failure of another rank that led to it."""
        if isinstance(error, RankError) or self._topic == _KNOWN:
            return
        if isinstance(error, Exception) and is_connection_error(error):
            raise self.failure_behind(error) from error
        if isinstance(error, ReplayError) and self._failure is not None:  # its graph was closed
            raise self._error(self._failure) from error
        if isinstance(error, GraphkitError) and self._topic != FAILURE:
            # Ranks that refuse the call, too, continue. A rank that waits in it ends.
            self._refusals += 1
            self.store.report(f"refusal {self._refusals}", self.refusal(error))
        else:
            self.leave(error)
