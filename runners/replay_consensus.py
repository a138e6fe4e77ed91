"""Agreement of ranks on how they run their batches of a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from graphkit.errors import GraphkitError, RankError, ReplayError
from graphkit.runners.dispatch import Dispatch, Reason
from graphkit.runners.ranks import AgreedSize, RankAction, RankReady, RunnerGroup
from graphkit.runners.step import Step
from graphkit.spec import ForwardMode

_REASONS = tuple(Reason)


class ReplayConsensus:
    """Agrees with the other ranks on each step of a runner, and counts the agreements.

    A batch is checked before the agreement, whether it has a graph or not, so that no rank waits in
    a collective for one with an invalid batch.

    Args:
        group: The ranks.
        number: Number of the runner in the group.
        step: The runner's step.
        dispatch: Says which batches have a graph.

    Attributes:
        agrees: Whether the ranks agree before each step; not if all have the same batch, except in
            the checking mode.
        agreements: Number of steps that the ranks agreed to run.
        idle: Number of those in which this rank had no request and ran pads.
    """

    def __init__(
        self,
        group: RunnerGroup,
        number: int,
        step: Step[Any],
        dispatch: Dispatch,
    ) -> None:
        self._group, self._number, self._mode = group, number, step.mode
        self._dispatch, self._step = dispatch, step
        self.run = group.run
        self.agrees = not group.same_batch or step.buffers.value_checks is not None
        self.agreements = self.idle = 0

    def agree(self, batch: Any, status: str, padded_batch_size: int | None) -> AgreedSize:
        """Check a batch, and agree with the other ranks on what all run.

        Raises:
            InputError: A field of the batch is missing or wrong. The other ranks raise RankError.
            ReplayError: The runner is closed, or a rank left or refused its batch.
            SizeError: ``padded_batch_size`` was not captured, or does not hold the batch.
        """
        return self._agree(lambda: self._ready(batch, status, padded_batch_size))

    def agree_on_staged(
        self, requests: int, padded_batch_size: int, check: Callable[[], None]
    ) -> int:
        """Agree on the size of a batch that has been written.

        Args:
            requests: Live requests.
            padded_batch_size: Captured size that holds them.
            check: Refuses values of the batch.

        Raises:
            InputError: From ``check``. The other ranks raise RankError.
            RankError: Another rank cannot replay; or see ``RankGroup.agree``.
        """
        if not self.agrees:
            check()
            return padded_batch_size

        def ready() -> RankReady:
            check()
            return self._message(RankAction.REPLAY, requests, padded_batch_size)

        agreed = self._agree(ready)
        self._require_replay(agreed)
        return agreed.padded_batch_size

    def size_to_replay(self, batch: Any, status: str, padded_batch_size: int | None) -> int | None:
        """Return the size at which all ranks replay; without agreement, ``padded_batch_size``.

        Raises:
            RankError: Another rank cannot replay.
            InputError, ReplayError, SizeError: See ``agree``.
        """
        if not self.agrees:
            return padded_batch_size
        agreed = self.agree(batch, status, padded_batch_size)
        self._require_replay(agreed)
        return agreed.padded_batch_size or None

    def counted(self, agreed: AgreedSize) -> AgreedSize:
        """Count an agreement, and return it."""
        if agreed.mode is not ForwardMode.IDLE:
            self.agreements += 1
            self.idle += not agreed.batch_sizes[self._group.rank]
        return agreed

    def explain(self, agreed: AgreedSize) -> str:
        """Return the reason why this rank cannot replay, or else the first rank that cannot."""
        reasons = dict(zip(agreed.eager_ranks, agreed.reasons, strict=True))
        if self._group.rank in reasons:
            return _REASONS[reasons[self._group.rank]].value
        rank = agreed.eager_ranks[0]
        return f"rank {rank}: {_REASONS[reasons[rank]].value}"

    def close(self, replays: int) -> None:
        """Agree that all ranks close this runner after the same number of replays.

        Raises:
            RankError: Another rank does something else, or replayed more or fewer steps.
            ReplayError: The process group was destroyed before.
        """
        self._group.close(
            RankReady(RankAction.CLOSE, runner=self._number, mode=self._mode, replays=replays)
        )

    def refuse(self, error: GraphkitError) -> NoReturn:
        """Make this step an error on all ranks, which is ``error`` on this one."""
        if self.agrees:
            self._group.refuse(self._message(RankAction.REFUSED), error)
        raise error

    def _require_replay(self, agreed: AgreedSize) -> None:
        """Refuse an agreement to run without a graph."""
        if not agreed.can_replay:
            raise RankError(
                f"the ranks cannot replay this step: {self.explain(agreed)}. Call run(batch) on "
                "all ranks, which falls back on all.",
                ranks=agreed.eager_ranks,
            )

    def _agree(self, ready: Callable[[], RankReady]) -> AgreedSize:
        try:
            message = ready()
        except GraphkitError as error:
            self.refuse(error)
        return self.counted(self._group.agree(message))

    def _ready(self, batch: Any, status: str, padded_batch_size: int | None) -> RankReady:
        eager_reason = self._dispatch.eager_reason(batch, status)
        requests = batch.batch_size
        if eager_reason is not None and not eager_reason.has_eager_way:
            raise ReplayError(f"{self._dispatch.explain(eager_reason, batch, status)}.")
        if not requests:
            self._step.buffers.checks.check_idle(batch)
            return self._message(RankAction.IDLE)
        if eager_reason is not None:
            self._step.check_unpadded(batch)
            return self._message(RankAction.EAGER, requests, reason=_REASONS.index(eager_reason))
        size = self._dispatch.checked_size(batch, padded_batch_size)
        return self._message(RankAction.REPLAY, requests, size)

    def _message(
        self, action: RankAction, batch_size: int = 0, padded_batch_size: int = 0, reason: int = 0
    ) -> RankReady:
        return RankReady(
            action, self._number, self._mode, batch_size, padded_batch_size, reason, self.agreements
        )
