"""The ring in pinned memory through which device loops return their reports."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat

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
_SEQUENCE, _LAUNCH = int(EntryWord.SEQUENCE), int(EntryWord.LAUNCH)
_LOOP_ENDS = tuple(LoopEnd)
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
        loop_end: Why the loop ended after the step, or ``LoopEnd.RUNNING``, which is false.
    """

    __slots__ = ("_index", "_lines", "batch_size", "launch", "loop_end")

    def __init__(
        self, batch_size: int, loop_end: LoopEnd, launch: int, lines: NDArray[np.int64], index: int
    ) -> None:
        self.launch, self.batch_size, self.loop_end = launch, batch_size, loop_end
        self._lines, self._index = lines, index

    @property
    def is_last(self) -> bool:
        """Whether the loop ended after the step."""
        return bool(self.loop_end)

    @property
    def words(self) -> NDArray[np.int64]:
        """The report, [batch_size, 4 + longest path]; see ``Report``."""
        words: NDArray[np.int64] = self._lines[self._index, : self.batch_size]
        return words

    @property
    def lines(self) -> list[list[int]]:
        """Rows of the report of the requests that took part."""
        return [line for line in self.words.tolist() if line[_ROW]]

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
        self.entries = entries
        self._line_shape = max_batch_size, Report.TOKENS + longest_path
        entry_words = ENTRY_WORDS + math.prod(self._line_shape)
        size = RING_WORDS + entries * entry_words
        self.words = torch.zeros(size, dtype=torch.int64, pin_memory=device.type == "cuda")
        array: NDArray[np.int64] = self.words.numpy()
        self._by_entry = array[RING_WORDS:].reshape(entries, entry_words)
        self._counted = np.arange(1, entries + 1)
        # Single words are read through a memoryview, ten times as fast as through numpy.
        self._words = memoryview(array)  # type: ignore[arg-type]
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

    def read(self) -> Sequence[StepReport]:
        """Return the oldest entries that were not read yet.

        They are of one launch, and end at the end of the ring at the latest.
        """
        number = self._words[_READ]
        first = number % self.entries
        if self._words[RING_WORDS + first * self._entry_words + _SEQUENCE] != number + 1:
            return ()
        entries = self._by_entry[first:]
        is_next = entries[:, _SEQUENCE] == self._counted[: len(entries)] + number
        is_next &= entries[:, _LAUNCH] == entries[0, _LAUNCH]
        count = int(np.count_nonzero(is_next))
        block = entries[:count].copy()
        # Last, because the device may write the entries again from now on.
        self._words[_READ] = number + count
        lines = block[:, ENTRY_WORDS:].reshape(count, *self._line_shape)
        _, sizes, ends, launches = block[:, : len(EntryWord)].T.tolist()
        loop_ends = map(_LOOP_ENDS.__getitem__, ends)
        return list(map(StepReport, sizes, loop_ends, launches, repeat(lines), range(count)))


def _request_of(line: Sequence[int]) -> RequestReport:
    return RequestReport(
        req_pool_index=line[Report.ROW],
        tokens=tuple(line[Report.TOKENS : Report.TOKENS + line[Report.NEW]]),
        num_accepted_tokens=line[Report.ACCEPTED],
        end=RequestEnd(line[Report.END]),
    )
