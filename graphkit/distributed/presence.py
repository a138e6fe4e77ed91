"""Which ranks of a process group are still there."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from graphkit.distributed.notes import Notes
from graphkit.errors import RankError, ReplayError

_SLICE = timedelta(seconds=1)
"""How long a rank waits for a vote before it looks whether another rank has given up."""
ROLL_CALL_S = 5.0
"""How long ranks wait for each other after a failure, to find out which one is missing."""
_DRAIN_S = 2.0
"""How long enqueued work may take to end by itself after another rank has failed."""


class Presence:
    """Base of ``RankGroup``: notices that a rank has left, and tells others that this one has.

    Args:
        process_group: The process group whose collectives are in the forwards.
        rank: Rank of this process in it.
        notes: Texts for the other ranks.
        time_limit: Seconds that a rank waits for another one.

    Attributes:
        process_group, rank, notes, time_limit: As given.
        size: Number of ranks.
    """

    def __init__(
        self, process_group: dist.ProcessGroup, rank: int, notes: Notes, time_limit: float
    ) -> None:
        self.process_group, self.rank, self.notes = process_group, rank, notes
        self.size, self.time_limit = process_group.size(), time_limit
        self._round = 0
        self._lost: RankError | None = None

    @property
    def others(self) -> list[int]:
        """All ranks but this one."""
        return [rank for rank in range(self.size) if rank != self.rank]

    @property
    def is_open(self) -> bool:
        """Whether the process group exists."""
        try:
            dist.get_backend(self.process_group)
        except (ValueError, AssertionError):
            return False
        return True

    @property
    def uses_nccl(self) -> bool:
        """Whether collectives of the process group run on CUDA devices, through NCCL."""
        backend = dist.get_backend(self.process_group)  # "undefined" if torch chooses by device
        return "nccl" in backend or (backend == "undefined" and torch.cuda.is_available())

    @property
    def is_lost(self) -> bool:
        """Whether a rank has left, so that every further call raises ``RankError``."""
        return self._lost is not None

    def leave(self, error: BaseException) -> None:
        """Tell the other ranks that this one takes no further part. Does not wait."""
        if self._lost is not None or not self.is_open:
            return
        self._lost = RankError(
            f"this rank left the group after {described(error)}", ranks=(self.rank,)
        )
        self.notes.write("left", described(error))

    def lose(self, message: str, ranks: tuple[int, ...]) -> RankError:
        """Give up: this and every later call raises the error that is returned.

        Work of the device that waits for a collective of another rank is aborted.
        """
        self._lost = RankError(message, ranks=ranks)
        self.release_device()
        return self._lost

    def require_open(self) -> None:
        """Refuse a group that was destroyed, or that a rank has left.

        Raises:
            RankError: A rank has left.
            ReplayError: The process group was destroyed.
        """
        if self._lost is not None:
            raise self._lost
        if not self.is_open:
            raise ReplayError(
                "the process group of this runner was destroyed. Close runners before "
                "torch.distributed.destroy_process_group."
            )

    def wait(self, work: Any) -> None:
        """Wait for a collective on the CPU, or until a rank has left.

        Raises:
            RankError: A rank has left, has ended, or did not come in time.
        """
        while True:
            try:
                work.wait(_SLICE)
            except RuntimeError as error:
                for rank in self.others:
                    self.check_left(rank)
                if work.is_completed() or self._others_gave_up():
                    raise self._find_missing(error) from error
            except BaseException as error:  # such as an interrupt, after which votes do not match
                self._lost = RankError(f"this rank was interrupted by {described(error)}")
                raise
            else:
                return

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

    def check_left(self, rank: int) -> None:
        """Raise ``RankError`` if a rank has left."""
        left = self.notes.read("left", rank)
        if left is not None:
            raise self.lose(f"rank {rank} left the group after {left}", (rank,))

    def _others_gave_up(self) -> bool:
        topic = f"gave up {self._round}"
        return any(self.notes.read(topic, rank) is not None for rank in self.others)

    def _find_missing(self, error: RuntimeError) -> RankError:
        """Find out which ranks are missing after a vote that failed."""
        topic = f"gave up {self._round}"
        self.notes.write(topic, "")
        present = self.notes.gather(topic, self.others, ROLL_CALL_S)
        missing = tuple(rank for rank in self.others if rank not in present)
        who = ", ".join(f"rank {rank}" for rank in missing) or "a rank"
        return self.lose(
            f"{who} did not answer in step {self._round}: it ended, or did not come within "
            f"{self.time_limit:g} s ({next(iter(str(error).splitlines()), '')[:160]})",
            missing,
        )


def _has_ended(stream: torch.cuda.Stream) -> bool:
    """Return whether the work of a stream has ended, also with an error."""
    try:
        return stream.query()
    except RuntimeError:
        return True


def described(error: BaseException) -> str:
    """Return the type and the message of an error."""
    return f"{type(error).__name__}: {error}".removesuffix(": ")
