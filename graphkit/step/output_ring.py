"""The ring in pinned memory through which device loops return their reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from graphkit.ops.loop_layout import (
    ENTRY_WORDS,
    RING_WORDS,
    EntryWord,
    LoopEnd,
    Report,
    RequestEnd,
    RingWord,
)


@dataclass(frozen=True, slots=True)
class RequestReport:
    """What a step did for one request.

    Attributes:
        req_pool_index: Row of the request.
        tokens: New tokens, a stop token included.
        num_accepted_tokens: Tokens that the step accepted, those behind the end included.
        end: Why the request ended, or ``RequestEnd.RUNNING``.
    """

    req_pool_index: int
    tokens: tuple[int, ...]
    num_accepted_tokens: int
    end: RequestEnd


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one step of a loop did.

    Attributes:
        launch: Number of the launch, from 1.
        batch_size: Captured size at which it ran.
        loop_end: Why the loop ended after the step, or ``LoopEnd.RUNNING``.
        lines: Rows of the report of the requests that took part; see
            ``graphkit.ops.loop_layout.Report``.
    """

    launch: int
    batch_size: int
    loop_end: LoopEnd
    lines: Sequence[Sequence[int]]

    @property
    def requests(self) -> list[RequestReport]:
        """What the step did for each request that took part, in the order of the batch."""
        return [_request_of(line) for line in self.lines]


class OutputRing:
    """Reports of steps, written by the device and read by the host without a CUDA call.

    Layout: ``graphkit.ops.loop_layout``. One reader at a time.

    Args:
        entries: Steps that the ring holds until they are read.
        max_batch_size: Requests of the largest size.
        longest_path: Most tokens of a path.
        device: Device that writes; the memory is pinned for CUDA.

    Attributes:
        words: The ring, int64.
    """

    def __init__(
        self, entries: int, max_batch_size: int, longest_path: int, device: torch.device
    ) -> None:
        self.entries, self._columns = entries, Report.TOKENS + longest_path
        entry_words = ENTRY_WORDS + max_batch_size * self._columns
        size = RING_WORDS + entries * entry_words
        self.words = torch.zeros(size, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._array: NDArray[np.int64] = self.words.numpy()
        self._entries = self._array[RING_WORDS:].reshape(entries, entry_words)

    @property
    def num_read(self) -> int:
        """Entries that the host has read."""
        return int(self._array[RingWord.READ])

    def stop(self, launch: int) -> None:
        """Ask the launch of this number, and all before it, to end after the step at hand."""
        self._array[RingWord.STOP] = max(launch, int(self._array[RingWord.STOP]))

    def clear(self) -> None:
        """Forget everything. The device must be idle."""
        self.words.zero_()

    def read(self) -> StepReport | None:
        """Return the oldest entry that was not read yet; ``None`` if there is none."""
        number = self.num_read
        entry = self._entries[number % self.entries]
        if entry[EntryWord.SEQUENCE] != number + 1:
            return None
        size = int(entry[EntryWord.BATCH_SIZE])
        lines = entry[ENTRY_WORDS : ENTRY_WORDS + size * self._columns].reshape(size, -1).tolist()
        report = StepReport(
            launch=int(entry[EntryWord.LAUNCH]),
            batch_size=size,
            loop_end=LoopEnd(int(entry[EntryWord.LOOP_END])),
            lines=[line for line in lines if line[Report.ROW]],
        )
        # Last, because the device may write the entry again from now on.
        self._array[RingWord.READ] = number + 1
        return report


def _request_of(line: Sequence[int]) -> RequestReport:
    return RequestReport(
        req_pool_index=line[Report.ROW],
        tokens=tuple(line[Report.TOKENS : Report.TOKENS + line[Report.NEW]]),
        num_accepted_tokens=line[Report.ACCEPTED],
        end=RequestEnd(line[Report.END]),
    )
