"""Ranks that capture and replay together."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from graphkit.distributed.collectives import Collectives, OneShotCollectives
from graphkit.distributed.notes import Notes
from graphkit.distributed.presence import ROLL_CALL_S, Presence, described
from graphkit.distributed.votes import ANY_RUNNER, WORDS, Agreement, Choice, Vote, outcome
from graphkit.errors import ConfigError, RankError, ReplayError
from graphkit.spec import ForwardMode

_MOST_S = 1e8
"""Limit of time limits: gloo counts milliseconds in 64 bits."""


class Member(Protocol):
    """A runner of a group."""

    def run_pads(self, agreement: Agreement) -> None:
        """Run the agreed step on pads."""
        ...


class RankGroup(Presence):
    """Ranks whose runners capture the same graphs and replay them together.

    A forward with collectives runs on all ranks or on none. Runners of a group therefore capture
    together, and before each replay the ranks agree on one of

    - the same graph on all ranks: the smallest size that holds the batch of every rank;
    - the forward without a graph on all ranks, if one of them cannot replay;
    - an error on all ranks, if one of them refuses its batch, has left, or runs something else.

    A rank without requests takes part with pads: ``idle``, or ``Runner.run`` of an empty batch.

    The agreement is one collective of 56 bytes per rank over a CPU process group (gloo), which
    this class creates. It needs none with ``same_batch``.

    Life: after ``torch.distributed.init_process_group`` -> runners with ``group=`` -> close all
    runners -> ``destroy_process_group``. NCCL waits forever if it is destroyed before the graphs
    that contain its collectives. Creating a group is collective: every rank of ``process_group``
    creates it, in the same order. One thread at a time may use it.

    Args:
        process_group: The process group whose collectives are in the forwards; ``None`` takes the
            default group.
        same_batch: All ranks run every batch, as in tensor parallelism with the same requests on
            all ranks. Replays then need no agreement. In the checking mode ranks still agree, and
            a rank whose batch has another size is an error.
        one_shot: The collectives of split models go through memory that the GPUs of one host share
            instead of through NCCL; see ``OneShotCollectives``. Device loops need that.
        time_limit: Seconds that a rank waits for another one. Allow for compilations and prefills
            that other ranks do not have. Collectives of a gloo ``process_group`` inside a forward
            have their own limit: that of ``init_process_group``.

    Attributes:
        process_group: As given.
        rank: Rank of this process in it.
        size: Number of its ranks.
        same_batch, time_limit: As given.
        collectives: What the forwards of split models use.
        agreement: The last agreement, such as for a forward that needs the ``batch_sizes`` of all
            ranks; ``None`` before the first one.

    Raises:
        ConfigError: ``torch.distributed`` is not initialised, this process is no member, or the
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
        member_of, rank = _member_of(process_group)
        seconds = _seconds(time_limit)
        self._control = dist.new_group(
            dist.get_process_group_ranks(member_of),
            timeout=timedelta(seconds=seconds),
            backend="gloo",
            use_local_synchronization=True,
            group_desc="graphkit",
        )
        notes = Notes(self._control.get_group_store(), rank)
        super().__init__(member_of, rank, notes, seconds)
        self.same_batch = bool(same_batch)
        self.collectives = self._collectives(one_shot)
        self.meetings = 0
        """Meetings of ``Lockstep`` so far."""
        self.agreement: Agreement | None = None
        self._votes = torch.zeros(self.size, WORDS, dtype=torch.int64)
        self._rows = self._votes.numpy()
        self._members: list[weakref.ref[Member]] = []

    def __repr__(self) -> str:
        return f"RankGroup(rank {self.rank} of {self.size})"

    @property
    def loop_refusal(self) -> str:
        """Why these ranks run no device loops, as a phrase; empty if they can."""
        if not self.same_batch:
            return "ranks with batches of their own agree on the host before each step"
        if self.uses_nccl and not isinstance(self.collectives, OneShotCollectives):
            return "NCCL's collectives do not run in loops: create the RankGroup with one_shot=True"
        return ""

    def add(self, runner: Member) -> int:
        """Add a runner and return its number. Every rank adds the same runners in order."""
        self._members.append(weakref.ref(runner))
        return len(self._members) - 1

    # Agreement.

    def agree(self, vote: Vote) -> Agreement:
        """Vote, wait for the votes of all ranks, and return what all do.

        Raises:
            RankError: A rank refused its batch, closed, left, or runs another mode.
            ReplayError: The process group was destroyed.
        """
        votes = self._collect(vote)
        self._check_taking_part(votes)
        self.agreement = outcome(votes, same_batch=self.same_batch)
        return self.agreement

    def idle(self) -> ForwardMode:
        """Take part in a step of the other ranks without a request: run pads of what they run.

        Returns:
            The mode that ran; IDLE if no rank has a request, so that nothing ran.

        Raises:
            RankError: As for ``agree``.
            ReplayError: The process group was destroyed, or ranks do not vote (``same_batch``).
        """
        if self.same_batch:
            raise ReplayError(
                "idle() needs ranks that agree, but same_batch=True says that all ranks have the "
                "same batch. Create the RankGroup without it."
            )
        agreement = self.agree(Vote(Choice.IDLE))
        if agreement.runner != ANY_RUNNER:
            runner = self._members[agreement.runner]()
            assert runner is not None, "a runner that ranks agree on is open"
            runner.run_pads(agreement)
        return agreement.mode

    def refuse(self, vote: Vote, error: BaseException) -> None:
        """Make this step an error on all ranks. The caller raises ``error`` after it."""
        self.notes.write(f"refused {self._round}", described(error))
        self._collect(vote)

    def close(self, vote: Vote) -> None:
        """Agree that all ranks close a runner after the same number of replays.

        Raises:
            RankError: Another rank does not close, or replayed more or fewer steps.
        """
        votes = self._collect(vote)
        self._check_taking_part(votes)
        try:
            outcome(votes, same_batch=False)
        except RankError:
            self.release_device()  # a replay that other ranks do not have would never end
            raise

    def leave(self, error: BaseException) -> None:
        """Tell the other ranks that this one takes no further part. Does not wait."""
        if self.is_lost or not self.is_open:
            return
        super().leave(error)
        if self.same_batch:  # others may never vote, and the end of the group would wait for it
            return
        try:
            self._vote(Vote(Choice.REFUSED))  # wakes ranks that wait for this one's vote
        except RuntimeError:
            return

    def _collectives(self, one_shot: bool) -> Collectives:
        if not one_shot:
            return Collectives(self.process_group)
        if not self.uses_nccl:
            raise ConfigError(
                "one_shot needs ranks with CUDA devices and NCCL. Leave it out.", field="one_shot"
            )
        return OneShotCollectives(self.process_group)

    def _check_taking_part(self, votes: Sequence[Vote]) -> None:
        """Refuse a round in which a rank refused its batch, or in which only some ranks close."""
        for rank, vote in enumerate(votes):
            if vote.choice is Choice.REFUSED and rank != self.rank:
                raise self._refusal_of(rank)
        closed = [rank for rank, vote in enumerate(votes) if vote.choice is Choice.CLOSE]
        if closed and len(closed) < self.size:
            going = next(rank for rank in range(self.size) if rank not in closed)
            shut = votes[closed[0]]
            raise self.lose(
                f"rank {closed[0]} closed {shut.mode.name} after {shut.replays} replays, but rank "
                f"{going} runs another step. All ranks must run the same steps and close together.",
                (closed[0], going),
            )

    def _refusal_of(self, rank: int) -> RankError:
        self.check_left(rank)
        found = self.notes.gather(f"refused {self._round - 1}", [rank], ROLL_CALL_S)
        cause = found.get(rank, "an error that it could not report")
        return RankError(f"rank {rank} refused its batch: {cause}", ranks=(rank,))

    def _collect(self, vote: Vote) -> list[Vote]:
        """Return the votes of all ranks, in order."""
        self.require_open()
        self.wait(self._vote(vote))
        self._round += 1
        return [Vote.of(row) for row in self._rows.tolist()]

    def _vote(self, vote: Vote) -> Any:
        self._rows[:] = 0
        self._rows[self.rank] = vote.words()
        return dist.all_reduce(self._votes, group=self._control, async_op=True)


def _member_of(process_group: object) -> tuple[dist.ProcessGroup, int]:
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
            f"process_group must be a torch.distributed.ProcessGroup of which this process is a "
            f"member, got {process_group!r}.",
            field="process_group",
        )
    return chosen, dist.get_rank(chosen)


def _seconds(given: object) -> float:
    if isinstance(given, (int, float)) and 0 < given < _MOST_S:
        return float(given)
    raise ConfigError(
        f"time_limit must be a number of seconds above 0, got {given!r}.", field="time_limit"
    )
