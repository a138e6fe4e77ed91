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

# Plain ints: indexing by an enum costs more than reading the word.
_READ, _STOP = int(RingWord.READ), int(RingWord.STOP)
_SEQUENCE, _BATCH_SIZE, _LOOP_END, _LAUNCH = (
    int(EntryWord.SEQUENCE), int(EntryWord.BATCH_SIZE), int(EntryWord.LOOP_END),
    int(EntryWord.LAUNCH),
)  # fmt: skip
_ROW = int(Report.ROW)


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


class StepReport:
    """What one step of a loop did. Decoded when it is asked for, so that reading stays cheap.

    Attributes:
        launch: Number of the launch, from 1.
        batch_size: Captured size at which it ran.
    """

    __slots__ = ("_loop_end", "_rows", "batch_size", "launch")

    def __init__(
        self, launch: int, batch_size: int, loop_end: int, rows: NDArray[np.int64]
    ) -> None:
        self.launch, self.batch_size = launch, batch_size
        self._loop_end, self._rows = loop_end, rows

    @property
    def loop_end(self) -> LoopEnd:
        """Why the loop ended after the step, or ``LoopEnd.RUNNING``."""
        return LoopEnd(self._loop_end)

    @property
    def is_last(self) -> bool:
        """Whether the loop ended after the step."""
        return self._loop_end != 0

    @property
    def lines(self) -> list[list[int]]:
        """Rows of the report of the requests that took part; see ``Report``."""
        rows = self._rows.reshape(self.batch_size, -1).tolist()
        return [line for line in rows if line[_ROW]]

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
        # Single words are read through a memoryview, ten times as fast as through numpy.
        self._words = memoryview(self._array)  # type: ignore[arg-type]
        self._entry_words = entry_words

    @property
    def num_read(self) -> int:
        """Entries that the host has read."""
        return int(self._words[_READ])

    def stop(self, launch: int) -> None:
        """Ask the launch of this number, and all before it, to end after the step that runs."""
        self._words[_STOP] = max(launch, self._words[_STOP])

    def clear(self) -> None:
        """Forget everything. The device must be idle."""
        self.words.zero_()

    def read(self) -> StepReport | None:
        """Return the oldest entry that was not read yet; ``None`` if there is none."""
        words, number = self._words, self._words[_READ]
        begin = RING_WORDS + number % self.entries * self._entry_words
        if words[begin + _SEQUENCE] != number + 1:
            return None
        size, rows = words[begin + _BATCH_SIZE], begin + ENTRY_WORDS
        report = StepReport(
            words[begin + _LAUNCH],
            size,
            words[begin + _LOOP_END],
            self._array[rows : rows + size * self._columns].copy(),
        )
        # Last, because the device may write the entry again from now on.
        words[_READ] = number + 1
        return report


def _request_of(line: Sequence[int]) -> RequestReport:
    return RequestReport(
        req_pool_index=line[Report.ROW],
        tokens=tuple(line[Report.TOKENS : Report.TOKENS + line[Report.NEW]]),
        num_accepted_tokens=line[Report.ACCEPTED],
        end=RequestEnd(line[Report.END]),
    )
