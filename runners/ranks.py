"""Ranks that capture and replay together: their interface, their messages, and what they agree on.

``graphkit.RankGroup`` implements the interface over ``torch.distributed``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol, TypeVar, runtime_checkable

from graphkit.errors import RankError
from graphkit.graphs import Backend
from graphkit.spec import ForwardMode

ResultT = TypeVar("ResultT")
ANY_RUNNER = -1
"""Number of the runner in the message of an idle rank, which runs what the others run."""
_MODES = tuple(ForwardMode)


class RankAction(IntEnum):
    """What a rank can do with its batch."""

    IDLE = 1
    REPLAY = 2
    EAGER = 3
    REFUSED = 4
    CLOSE = 5


@dataclass(frozen=True, slots=True)
class RankReady:
    """Message of a rank before a replay.

    Attributes:
        action: What the rank can do with its batch.
        runner: Number of its runner, in the order of construction; ``ANY_RUNNER`` if it is idle.
        mode: Mode of the runner; IDLE with ``ANY_RUNNER``.
        batch_size: Live requests.
        padded_batch_size: Captured size that holds them; 0 if the rank is idle or cannot replay.
        reason: Number of the reason why it cannot replay; 0 if it can.
        replays: Number of earlier agreements of this runner; with ``CLOSE``, of its replays.
    """

    action: RankAction
    runner: int = ANY_RUNNER
    mode: ForwardMode = ForwardMode.IDLE
    batch_size: int = 0
    padded_batch_size: int = 0
    reason: int = 0
    replays: int = 0

    def words(self) -> list[int]:
        """Return the message as numbers, for a collective."""
        return [
            self.action, self.runner, _MODES.index(self.mode), self.batch_size,
            self.padded_batch_size, self.reason, self.replays,
        ]  # fmt: skip

    @classmethod
    def of(cls, words: Sequence[int]) -> RankReady:
        """Return the message of numbers."""
        action, runner, mode, *others = words
        return cls(RankAction(action), runner, _MODES[mode], *others)


WORDS = len(RankReady(RankAction.IDLE).words())


@dataclass(frozen=True, slots=True)
class AgreedSize:
    """Step that all ranks run.

    Attributes:
        mode: The mode that runs; IDLE if every rank is idle, so that none runs anything.
        runner: Number of the runner, in the order of construction.
        padded_batch_size: Captured size that every rank replays: the smallest that holds the
            batch of every rank; 0 if the ranks run eagerly or are idle.
        batch_sizes: Live requests of each rank.
        eager_ranks: Ranks that cannot replay, so that all run eagerly.
        reasons: Number of the reason of each of ``eager_ranks``.
    """

    mode: ForwardMode
    runner: int
    padded_batch_size: int
    batch_sizes: tuple[int, ...]
    eager_ranks: tuple[int, ...] = ()
    reasons: tuple[int, ...] = ()

    @property
    def can_replay(self) -> bool:
        """Whether the ranks replay; also true if all are idle."""
        return not self.eager_ranks


class GroupMember(Protocol):
    """A runner of a group."""

    def run_pads(self, agreed: AgreedSize) -> None:
        """Run the agreed step on pads."""
        ...


@runtime_checkable
class RunnerGroup(Protocol):
    """What runners need of the ranks that they capture and replay with.

    ``graphkit.RankGroup`` is the implementation. Every rank makes the same calls in the same order.

    Attributes:
        rank: Rank of this process.
        same_batch: Whether all ranks run every batch, so that replays need no agreement.
    """

    rank: int
    same_batch: bool

    @property
    def has_raised(self) -> bool:
        """Whether a rank has failed, and this one has raised an error for it."""

    def add(self, runner: GroupMember) -> int:
        """Add a runner and return its number."""

    def capturing_backend(self, backend: Backend, settings: Mapping[str, str]) -> Backend:
        """Return a backend whose captures run on all ranks at once.

        Args:
            backend: Backend of this rank.
            settings: Settings that must be the same on every rank, by name.
        """

    def run(self, call: Callable[..., ResultT], *arguments: object) -> ResultT:
        """Call a function that all ranks call, so that a failure on one ends it on all."""

    def agree(self, ready: RankReady) -> AgreedSize:
        """Send what this rank can run, wait for all ranks, and return the step that all run."""

    def refuse(self, ready: RankReady, error: BaseException) -> None:
        """Make this step an error on all ranks. The caller raises ``error`` after it."""

    def close(self, ready: RankReady) -> None:
        """Agree that all ranks close a runner after the same number of replays."""

    def on_any(self, value: bool) -> bool:
        """Return whether a value is true on any rank."""

    def leave(self, error: BaseException) -> None:
        """Report that this rank leaves the group because of an error. Waits for no rank."""


def agreed_size(ready: Sequence[RankReady], *, same_batch: bool) -> AgreedSize:
    """Return the step that follows from the messages of all ranks.

    Args:
        ready: One message per rank, in the order of ranks; none is REFUSED or CLOSE.
        same_batch: Whether the ranks must have the same batch.

    Raises:
        RankError: Modes or numbers of steps differ between ranks, or batches with ``same_batch``.
    """
    running = [sent for sent in ready if sent.runner != ANY_RUNNER]
    named = [f"{sent.mode.name} (runner {sent.runner})" for sent in running]
    ranks = [rank for rank, sent in enumerate(ready) if sent.runner != ANY_RUNNER]
    _check_equal(running, "the mode of this step", named, ranks)
    _check_equal(running, "replays so far", [sent.replays for sent in running], ranks)
    if same_batch:
        sizes = [f"{sent.batch_size} requests at {sent.padded_batch_size}" for sent in ready]
        _check_equal(ready, "the batch, which same_batch says is the same", sizes)
    eager = tuple(rank for rank, sent in enumerate(ready) if sent.action is RankAction.EAGER)
    live = any(sent.action is not RankAction.IDLE for sent in ready)
    return AgreedSize(
        mode=running[0].mode if live else ForwardMode.IDLE,
        runner=running[0].runner if live else ANY_RUNNER,
        padded_batch_size=0 if eager else max(sent.padded_batch_size for sent in ready),
        batch_sizes=tuple(sent.batch_size for sent in ready),
        eager_ranks=eager,
        reasons=tuple(ready[rank].reason for rank in eager),
    )


def _check_equal(
    ready: Sequence[RankReady],
    what: str,
    values: Sequence[object],
    ranks: Sequence[int] | None = None,
) -> None:
    """Refuse values that differ between ranks."""
    ranks = range(len(ready)) if ranks is None else ranks
    for rank, value in zip(ranks, values, strict=True):
        if value != values[0]:
            raise RankError(
                f"ranks disagree on {what}: rank {ranks[0]} has {values[0]}, rank {rank} has "
                f"{value}. All ranks must call the same runners in the same order.",
                ranks=(ranks[0], rank),
            )
