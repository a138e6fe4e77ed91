"""Ranks that capture and replay together.

A ``torch.distributed.ProcessGroup`` runs collectives. This class decides before each replay, on all
ranks alike, whether and at which size the forward with these collectives runs.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from graphkit.distributed.barrier_backend import BarrierBackend, CaptureBarrier
from graphkit.distributed.collectives import Collectives, OneShotCollectives
from graphkit.distributed.connections import limit_gloo
from graphkit.distributed.guarded_calls import GuardedCalls
from graphkit.distributed.rank_store import failure_of_wait
from graphkit.errors import ConfigError, RankError, ReplayError, short_repr
from graphkit.graphs import Backend
from graphkit.runners.ranks import (
    ANY_RUNNER,
    WORDS,
    AgreedSize,
    GroupMember,
    RankAction,
    RankReady,
    agreed_size,
)
from graphkit.spec import ForwardMode

logger = logging.getLogger(__name__)
_MOST_S = 1e8
"""Largest time limit: gloo counts milliseconds in 64 bits."""


class RankGroup(GuardedCalls):
    """Ranks whose runners capture the same graphs and replay them together.

    A forward with collectives runs on all ranks or on none. Runners of a group therefore capture
    together, and before each replay the ranks agree on one of

    - the same graph on all ranks: the smallest size that holds the batch of every rank;
    - the forward without a graph on all ranks, if one of them cannot replay;
    - an error on all ranks, if one of them refuses its batch, has left, or runs something else.

    A rank without requests takes part with pads: ``idle``, or ``Runner.run`` of an empty batch.

    The agreement is one collective of 56 bytes per rank over a CPU process group (gloo), which
    this class creates. With ``same_batch`` replays need no agreement.

    Life cycle: after ``torch.distributed.init_process_group`` -> runners with ``group=`` -> close
    all runners -> ``destroy_process_group``. NCCL waits forever if it is destroyed before the
    graphs that contain its collectives. Creating a group is collective: every rank of
    ``process_group`` creates it, in the same order. One thread at a time may use it.

    Args:
        process_group: The process group whose collectives are in the forwards; ``None`` selects
            the default group.
        same_batch: All ranks run every batch, as in tensor parallelism with the same requests on
            all ranks. Replays then need no agreement. In the checking mode ranks still agree, and
            a rank whose batch has another size is an error.
        one_shot: The collectives of split models go through memory that the GPUs of one host share
            instead of through NCCL; see ``OneShotCollectives``. Device loops need that.
        time_limit: Seconds that a rank waits for another one. Allow for compilations and prefills
            that other ranks do not have. If ``process_group`` uses gloo, its collectives get this
            limit, too, unless theirs is shorter. If it uses NCCL, it is aborted two seconds after
            a rank has failed or exceeded the limit, and the graphs of its runners are closed.

    Attributes:
        process_group: As passed.
        rank: Rank of this process in it.
        size: Number of its ranks.
        same_batch, time_limit: As passed.
        collectives: Collectives of the forwards of split models.
        agreed_size: Result of the last agreement, for forwards that need the ``batch_sizes`` of all
            ranks; ``None`` before the first step.

    Raises:
        ConfigError: ``torch.distributed`` is not initialised, this process is not a member, or the
            ranks share no memory for ``one_shot``.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        same_batch: bool = False,
        one_shot: bool = False,
        time_limit: float = 300.0,
    ) -> None:
        members, rank = _membership(process_group)
        super().__init__(members, rank, _checked_seconds(time_limit))
        limit_gloo(members, self.time_limit)
        self.same_batch = bool(same_batch)
        self.collectives = self._collectives(one_shot)
        self.agreed_size: AgreedSize | None = None
        self._ready = torch.zeros(self.size, WORDS, dtype=torch.int64)
        self._rows = self._ready.numpy()
        self._members: list[weakref.ref[GroupMember]] = []
        logger.info("Rank %d of %d joined its group.", rank, self.size)

    def __repr__(self) -> str:
        return f"RankGroup(rank {self.rank} of {self.size})"

    @property
    def no_loop_reason(self) -> str:
        """Reason why these ranks run no device loops, or an empty string."""
        if not self.same_batch:
            return "ranks with batches of their own agree on the host before each step"
        if self.uses_nccl and not isinstance(self.collectives, OneShotCollectives):
            return "NCCL's collectives do not run in loops: create the RankGroup with one_shot=True"
        return ""

    def add(self, runner: GroupMember) -> int:
        """Add a runner and return its number. Every rank adds the same runners in order."""
        self._members.append(weakref.ref(runner))
        return len(self._members) - 1

    def capturing_backend(self, backend: Backend, settings: Mapping[str, str]) -> Backend:
        """Return a backend whose warm-ups and captures run on all ranks at once.

        Args:
            backend: Backend of this rank.
            settings: Settings that must be the same on every rank, by name.
        """
        return BarrierBackend(backend, self, settings, self.no_loop_reason)

    def on_any(self, value: bool) -> bool:
        """Return whether a value is true on any rank, at a barrier of all."""
        return CaptureBarrier(self).on_any(value)

    # Agreement.

    def agree(self, ready: RankReady) -> AgreedSize:
        """Send what this rank can run, wait for all ranks, and return the step that all run.

        Raises:
            RankError: A rank refused its batch, closed, left, or runs another mode.
            ReplayError: The process group was destroyed.
        """
        return self.guard(self._agree, ready)

    def idle(self) -> ForwardMode:
        """Take part in a step without a request: run pads through the runner of the other ranks.

        Returns:
            The mode that ran; IDLE if no rank has a request, so that nothing ran.

        Raises:
            RankError: As for ``agree``, or this rank has dropped the runner that the others run.
            ReplayError: The process group was destroyed, or ranks do not agree (``same_batch``).
        """
        if self.same_batch:
            raise ReplayError(
                "idle() needs ranks that agree, but same_batch=True says that all ranks have the "
                "same batch. Create the RankGroup without it."
            )
        return self.run(self._idle)

    def refuse(self, ready: RankReady, error: BaseException) -> None:
        """Make this step an error on all ranks. The caller raises ``error`` after it."""
        self.store.report(failure_of_wait(self.waits + 1), self.refusal(error))
        self._collect(ready)
        self.end_refusal()

    def close(self, ready: RankReady) -> None:
        """Agree that all ranks close a runner after the same number of replays.

        Raises:
            RankError: Another rank does not close, or replayed more or fewer steps.
        """
        self.guard(self._close, ready)

    def _agree(self, ready: RankReady) -> AgreedSize:
        of_all = self._collect(ready)
        self._check_taking_part(of_all)
        self.agreed_size = agreed_size(of_all, same_batch=self.same_batch)
        return self.agreed_size

    def _idle(self) -> ForwardMode:
        agreed = self._agree(RankReady(RankAction.IDLE))
        if agreed.runner != ANY_RUNNER:
            runner = self._members[agreed.runner]()
            if runner is None:
                text = (
                    f"rank {self.rank} has dropped its runner {agreed.runner} of "
                    f"{agreed.mode.name}, which other ranks run. Keep every runner until all ranks "
                    "close it"
                )
                raise self.fail((self.rank,), text)
            runner.run_pads(agreed)
        return agreed.mode

    def _close(self, ready: RankReady) -> None:
        of_all = self._collect(ready)
        self._check_taking_part(of_all)
        try:
            agreed_size(of_all, same_batch=False)
        except RankError as error:  # a replay that other ranks do not have never ends
            raise self.fail(error.ranks, str(error)) from error

    def _collectives(self, one_shot: bool) -> Collectives:
        if not one_shot:
            return Collectives(self.process_group)
        if not self.uses_nccl:
            raise ConfigError(
                "one_shot needs ranks with CUDA devices and NCCL. Leave it out.", field="one_shot"
            )
        return OneShotCollectives(self.process_group)

    def _check_taking_part(self, of_all: Sequence[RankReady]) -> None:
        """Refuse a step in which a rank refused its batch, or in which only some ranks close."""
        refused = [rank for rank, sent in enumerate(of_all) if sent.action is RankAction.REFUSED]
        if refused and self.rank not in refused:
            first = self.store.failure(failure_of_wait(self.waits))
            raise (
                first.error(self.rank)
                if first
                else RankError(f"rank {refused[0]} refused its batch.", ranks=(refused[0],))
            )
        closed = [rank for rank, sent in enumerate(of_all) if sent.action is RankAction.CLOSE]
        if closed and len(closed) < self.size:
            going = next(rank for rank in range(self.size) if rank not in closed)
            shut = of_all[closed[0]]
            text = (
                f"rank {closed[0]} closed {shut.mode.name} after {shut.replays} replays, but rank "
                f"{going} runs another step. All ranks must run the same steps and close together"
            )
            raise self.fail((closed[0], going), text)

    def _collect(self, ready: RankReady) -> list[RankReady]:
        """Exchange what each rank can run. From here on the other ranks rely on this one."""
        self.begin_wait()
        self._rows[:] = 0
        self._rows[self.rank] = ready.words()
        self.wait(dist.all_reduce(self._ready, group=self.control, async_op=True))
        return [RankReady.of(row) for row in self._rows.tolist()]


def _membership(process_group: object) -> tuple[dist.ProcessGroup, int]:
    """Return the process group and the rank of this process in it.

    Raises:
        ConfigError: There is no process group, it is something else, or this process is no member.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise ConfigError(
            "a RankGroup needs torch.distributed: call init_process_group first.",
            field="process_group",
        )
    chosen = dist.group.WORLD if process_group is None else process_group
    if not isinstance(chosen, dist.ProcessGroup):
        raise ConfigError(
            "process_group must be a torch.distributed.ProcessGroup of which this process is a "
            f"member, got {short_repr(process_group)}.",
            field="process_group",
        )
    return chosen, dist.get_rank(chosen)


def _checked_seconds(value: object) -> float:
    if isinstance(value, (int, float)) and 0 < value < _MOST_S:
        return float(value)
    raise ConfigError(
        f"time_limit must be a number of seconds above 0, got {short_repr(value)}.",
        field="time_limit",
    )
