"""Messages of ranks before a replay, and the size that they agree on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from graphkit.errors import RankError
from graphkit.spec import ForwardMode

ANY_RUNNER = -1
"""Number of the runner in the message of an idle rank, which runs what the others run."""
_MODES = tuple(ForwardMode)


class Choice(IntEnum):
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
        choice: What the rank can do with its batch.
        runner: Number of its runner, in the order of construction; ``ANY_RUNNER`` if it is idle.
        mode: Mode of the runner; IDLE with ``ANY_RUNNER``.
        batch_size: Live requests.
        padded_batch_size: Captured size that holds them; 0 if the rank is idle or cannot replay.
        reason: Number of the reason why it cannot replay; 0 if it can.
        replays: Number of earlier agreements of this runner; with ``CLOSE``, of its replays.
    """

    choice: Choice
    runner: int = ANY_RUNNER
    mode: ForwardMode = ForwardMode.IDLE
    batch_size: int = 0
    padded_batch_size: int = 0
    reason: int = 0
    replays: int = 0

    def words(self) -> list[int]:
        """Return the message as numbers, for a collective."""
        return [
            self.choice, self.runner, _MODES.index(self.mode), self.batch_size,
            self.padded_batch_size, self.reason, self.replays,
        ]  # fmt: skip

    @classmethod
    def of(cls, words: Sequence[int]) -> RankReady:
        """Return the message of numbers."""
        choice, runner, mode, *others = words
        return cls(Choice(choice), runner, _MODES[mode], *others)


WORDS = len(RankReady(Choice.IDLE).words())


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
    eager = tuple(rank for rank, sent in enumerate(ready) if sent.choice is Choice.EAGER)
    live = any(sent.choice is not Choice.IDLE for sent in ready)
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
    """Refuse values that differ between ranks.

    Raises:
        RankError: They differ; the text has the first two that do.
    """
    ranks = range(len(ready)) if ranks is None else ranks
    for rank, value in zip(ranks, values, strict=True):
        if value != values[0]:
            raise RankError(
                f"ranks disagree on {what}: rank {ranks[0]} has {values[0]}, rank {rank} has "
                f"{value}. All ranks must call the same runners in the same order.",
                ranks=(ranks[0], rank),
            )
