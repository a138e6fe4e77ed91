"""Barriers of ranks that capture together, and the failure that ends a capture on all of them.

``torch.distributed.monitored_barrier`` names the ranks that are missing after its time limit. This
barrier ends as soon as a rank fails, and raises the cause of that rank on all of them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from graphkit.distributed.connections import is_connection_error
from graphkit.distributed.guarded_calls import GuardedCalls
from graphkit.distributed.rank_store import Failure, failure_of_wait
from graphkit.errors import CaptureCause, ConfigError, RankError
from graphkit.graphs import CaptureFailure
from graphkit.graphs.capture_failure import as_capture_failure

logger = logging.getLogger(__name__)
ResultT = TypeVar("ResultT")


class RankFailure(CaptureFailure):
    """A failed capture of one rank, raised on all ranks; ``rank`` is that rank, if it is known."""

    def __init__(self, cause: CaptureCause, where: str, rank: int | None) -> None:
        super().__init__(cause, where)
        self.rank = rank


class CaptureBarrier:
    """Barriers of ranks that capture together: each rank continues when all have arrived.

    A barrier goes through the store of the process group and runs no tensor operation, so that
    ranks may wait during a capture.

    Args:
        group: The ranks.
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
        """Report success, and wait until all other ranks have done so.

        Raises:
            RankFailure: A rank failed, or did not arrive within the time limit.
        """
        self._gather(None)

    def on_any(self, is_needed: bool) -> bool:
        """Wait for all ranks, and return whether any of them passes true.

        Raises:
            RankFailure: A rank has failed, or did not arrive within the time limit.
        """
        return any(self._gather(is_needed))

    def broadcast_from_rank_0(self, value: float) -> float:
        """Wait for all ranks, and return the number that rank 0 passes.

        Raises:
            RankFailure: A rank has failed, or did not arrive within the time limit.
        """
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
