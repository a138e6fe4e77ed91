"""Votes of a runner whose ranks agree before each replay."""

from __future__ import annotations

from typing import Any

from graphkit.buffers import InputBuffers
from graphkit.distributed import Agreement, Choice, RankGroup, Vote
from graphkit.errors import GraphkitError, RankError, ReplayError, SizeError
from graphkit.graphs import SizeTable
from graphkit.runners.dispatch import Dispatch, Reason, require_count
from graphkit.spec import ForwardMode

_REASONS = tuple(Reason)


class Ballot:
    """Votes for the batches of one runner, and counts what the ranks agreed on.

    A batch is checked before its rank votes, so that a rank with an invalid batch keeps no other
    rank waiting in a collective.

    Args:
        group: The ranks.
        number: Number of the runner in the group.
        mode: Mode of the runner.
        dispatch: Says which batches have a graph.
        table: Captured sizes.
        buffers: Buffers of the runner.

    Attributes:
        agreements: Steps that the ranks agreed to run.
        idle: Those in which this rank had no request and ran pads.
    """

    def __init__(
        self,
        group: RankGroup,
        number: int,
        mode: ForwardMode,
        dispatch: Dispatch,
        table: SizeTable,
        buffers: InputBuffers,
    ) -> None:
        self._group, self._number, self._mode = group, number, mode
        self._dispatch, self._table, self._buffers = dispatch, table, buffers
        self.agreements = self.idle = 0

    def agree(self, batch: Any, status: str, padded_batch_size: int | None) -> Agreement:
        """Check a batch, and agree with the other ranks on what all run.

        Raises:
            InputError: A field of the batch is missing or wrong. The other ranks raise RankError.
            ReplayError: The runner is closed, or a rank left or refused its batch.
            SizeError: ``padded_batch_size`` was not captured, or does not hold the batch.
        """
        try:
            vote = self._vote(batch, status, padded_batch_size)
        except GraphkitError as error:
            self._group.refuse(self._of(Choice.REFUSED), error)
            raise
        return self.counted(self._group.agree(vote))

    def agree_on_size(self, requests: int, padded_batch_size: int) -> int:
        """Agree on the size of a batch that is written already.

        Raises:
            RankError: Another rank cannot replay; or see ``RankGroup.agree``.
        """
        vote = self._of(Choice.REPLAY, requests, padded_batch_size)
        agreement = self.counted(self._group.agree(vote))
        self.require_replay(agreement)
        return agreement.padded_batch_size

    def counted(self, agreement: Agreement) -> Agreement:
        """Count an agreement, and return it."""
        if agreement.mode is not ForwardMode.IDLE:
            self.agreements += 1
            self.idle += not agreement.batch_sizes[self._group.rank]
        return agreement

    def require_replay(self, agreement: Agreement) -> None:
        """Refuse an agreement on an eager run.

        Raises:
            RankError: A rank cannot replay.
        """
        if not agreement.can_replay:
            raise RankError(
                f"the ranks cannot replay this step: {self.explain(agreement)}. Call run(batch) on "
                "all ranks, which falls back on all.",
                ranks=agreement.eager_ranks,
            )

    def explain(self, agreement: Agreement) -> str:
        """Return the first rank that cannot replay and why: a reason to count."""
        rank, reason = agreement.eager_ranks[0], _REASONS[agreement.reasons[0]]
        own = self._group.rank in agreement.eager_ranks
        if own:
            reason = _REASONS[agreement.reasons[agreement.eager_ranks.index(self._group.rank)]]
        return reason.value if own else f"rank {rank}: {reason.value}"

    def close(self, replays: int) -> None:
        """Agree that all ranks close this runner after the same number of replays.

        Raises:
            RankError: Another rank does something else, or replayed more or fewer steps.
            ReplayError: The process group was destroyed before.
        """
        self._group.close(Vote(Choice.CLOSE, runner=self._number, mode=self._mode, replays=replays))

    def _vote(self, batch: Any, status: str, padded_batch_size: int | None) -> Vote:
        miss = self._dispatch.miss(batch, status)
        requests = batch.batch_size
        if miss is not None and not miss.has_eager_way:
            raise ReplayError(f"{self._dispatch.explain(miss, batch, status)}.")
        if not requests:
            self._dispatch.check_idle(batch)
            return self._of(Choice.IDLE)
        if miss is not None:
            return self._of(Choice.EAGER, requests, reason=_REASONS.index(miss))
        self._dispatch.admit_all(batch)
        if self._buffers.value_checks is not None:
            self._buffers.value_checks.report()
            self._buffers.value_checks.check(batch)
        size = self._table.fit(requests)
        if padded_batch_size is not None:
            require_count("padded_batch_size", padded_batch_size)
            if padded_batch_size not in self._table.sizes or padded_batch_size < requests:
                raise SizeError(
                    f"{requests} requests cannot run at batch size {padded_batch_size}: captured "
                    f"are {list(self._table)}.",
                    batch_size=requests,
                    largest=self._table.largest,
                )
            size = padded_batch_size
        return self._of(Choice.REPLAY, requests, size)

    def _of(
        self, choice: Choice, batch_size: int = 0, padded_batch_size: int = 0, reason: int = 0
    ) -> Vote:
        return Vote(
            choice, self._number, self._mode, batch_size, padded_batch_size, reason, self.agreements
        )
