"""The ring in pinned memory through which device loops return their reports."""

from __future__ import annotations

import math
import platform
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock

import numpy as np
import torch
from numpy.typing import NDArray

from graphkit.ops.loop_layout import (
    ENTRY_WORDS,
    NO_LOGPROB,
    RING_WORDS,
    EntryWord,
    LoopEnd,
    Report,
    RequestEnd,
    RingWord,
)

# Plain ints: indexing by an enum costs more than reading the word.
_READ, _STOP = int(RingWord.READ), int(RingWord.STOP)
_SEQUENCE, _BATCH_SIZE, _LOOP_END, _LAUNCH, _LENGTH = (
    int(EntryWord.SEQUENCE), int(EntryWord.BATCH_SIZE), int(EntryWord.LOOP_END),
    int(EntryWord.LAUNCH), int(EntryWord.LENGTH),
)  # fmt: skip
_PLAIN_TIME, _STEP_TIME = int(EntryWord.PLAIN_TIME), int(EntryWord.STEP_TIME)
_LOOP_ENDS = tuple(LoopEnd)
_IS_ORDERED = platform.machine().lower() in ("x86_64", "amd64")
"""Whether the host needs no fence. Others, such as Arm's, reorder loads."""
_ROW = int(Report.ROW)


@dataclass(frozen=True, slots=True)
class RequestReport:
    """What a step did for one request.

    Attributes:
        req_pool_index: Row of the request.
        tokens: New tokens, a stop token included.
        logprobs: Log-probability of each; empty for a request without ``logprobs``.
        num_accepted_tokens: Tokens that the step accepted, those behind the end included.
        end: Why the request ended, or ``RequestEnd.RUNNING``.
    """

    req_pool_index: int
    tokens: tuple[int, ...]
    num_accepted_tokens: int
    end: RequestEnd
    logprobs: tuple[float, ...] = ()


class StepBlock:
    """Consecutive steps of one launch, copied from the ring.

    Attributes:
        words: Their entries, int64.
        offsets: Index of the first word of each entry.
        columns: Words of a request in an entry.
        number: Number of the first step, counted from 0 over all launches.
    """

    __slots__ = ("columns", "number", "offsets", "words")

    def __init__(self, words: memoryview, entry_words: int, columns: int) -> None:
        self.words, self.columns = words, columns
        self.offsets = range(0, len(words), entry_words)
        self.number = int(words[_SEQUENCE]) - 1

    @property
    def launch(self) -> int:
        """Number of the launch."""
        return int(self.words[_LAUNCH])

    @property
    def loop_end(self) -> LoopEnd:
        """Why the loop ended after the last of the steps; false if it runs on."""
        return _LOOP_ENDS[self.words[self.offsets[-1] + _LOOP_END]]

    @property
    def batch_sizes(self) -> list[int]:
        """Captured size of each step."""
        sizes: list[int] = self.words[_BATCH_SIZE :: self.offsets.step].tolist()
        return sizes

    @property
    def lengths(self) -> list[int]:
        """Index of the draft length of each step."""
        lengths: list[int] = self.words[_LENGTH :: self.offsets.step].tolist()
        return lengths

    @property
    def times(self) -> tuple[int, int]:
        """Times of plain decoding and of the steps before the last one; see ``EntryWord``."""
        last = self.offsets[-1]
        return int(self.words[last + _PLAIN_TIME]), int(self.words[last + _STEP_TIME])

    def count_live_sizes(self, counts: Counter[int]) -> None:
        """Count the steps by the number of requests that took part.

        Requests only leave a launch, so that steps between two of equal size need not be read.
        """
        spans = [(0, len(self.offsets) - 1)]
        while spans:
            first, last = spans.pop()
            most, least = self._live_size(first), self._live_size(last)
            if most == least:
                counts[most] += last - first + 1
            elif last - first == 1:
                counts[most] += 1
                counts[least] += 1
            else:
                middle = (first + last) // 2
                spans += [(first, middle), (middle + 1, last)]

    def _live_size(self, step: int) -> int:
        """Return the number of requests that took part in a step."""
        offset = self.offsets[step]
        begin, size = offset + ENTRY_WORDS + _ROW, self.words[offset + _BATCH_SIZE]
        rows = self.words[begin : begin + size * self.columns : self.columns].tolist()
        return int(size) - rows.count(0)


class StepReport:
    """What one step of a loop did. Decoded when it is asked for, so that reading stays cheap."""

    __slots__ = ("_block", "_offset")

    def __init__(self, block: StepBlock, offset: int) -> None:
        self._block, self._offset = block, offset

    @property
    def launch(self) -> int:
        """Number of the launch, from 1."""
        return self._block.launch

    @property
    def batch_size(self) -> int:
        """Captured size at which the step ran."""
        return int(self._block.words[self._offset + _BATCH_SIZE])

    @property
    def length(self) -> int:
        """Index of the draft length of the step, 0 if there is one."""
        return int(self._block.words[self._offset + _LENGTH])

    @property
    def loop_end(self) -> LoopEnd:
        """Why the loop ended after the step, or ``LoopEnd.RUNNING``, which is false."""
        return _LOOP_ENDS[self._block.words[self._offset + _LOOP_END]]

    @property
    def is_last(self) -> bool:
        """Whether the loop ended after the step."""
        return bool(self.loop_end)

    @property
    def words(self) -> NDArray[np.int64]:
        """The report, [batch_size, 5 + 2 * longest path]; see ``graphkit.ops.loop_layout``."""
        shape = self.batch_size, self._block.columns
        offset = (self._offset + ENTRY_WORDS) * self._block.words.itemsize
        words = np.frombuffer(self._block.words, np.int64, math.prod(shape), offset)
        return words.reshape(shape)

    @property
    def rows(self) -> list[list[int]]:
        """Rows of the report of the requests that took part."""
        words, columns = self._block.words, self._block.columns
        begin = self._offset + ENTRY_WORDS
        firsts = range(begin, begin + self.batch_size * columns, columns)
        return [words[first : first + columns].tolist() for first in firsts if words[first + _ROW]]

    @property
    def requests(self) -> list[RequestReport]:
        """What the step did for each request that took part, in the order of the batch."""
        return [_request_report(row) for row in self.rows]


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
        self._columns = Report.TOKENS + 2 * longest_path
        self._entry_words = ENTRY_WORDS + max_batch_size * self._columns
        size = RING_WORDS + entries * self._entry_words
        self.words = torch.zeros(size, dtype=torch.int64, pin_memory=device.type == "cuda")
        # numpy and torch take ten times as long for a single word.
        self._words = memoryview(self.words.numpy())  # type: ignore[arg-type]
        self._fence = _no_fence if _IS_ORDERED else _fence

    @property
    def num_read(self) -> int:
        """Entries that the host has read."""
        return int(self._words[_READ])

    def stop(self, launch: int) -> None:
        """Ask the launch of this number, and all before it, to end after the step that runs."""
        self._words[_STOP] = max(launch, self._words[_STOP])

    def skip(self, number: int) -> None:
        """Continue at the entry of this number, counted from 0. The device must be idle."""
        self._words[_READ] = number

    def clear(self) -> None:
        """Forget everything. The device must be idle."""
        self.words.zero_()

    def read(self) -> StepBlock | None:
        """Return the oldest entries that were not released; ``None`` if there are none.

        They are of one launch, and end at the end of the ring at the latest. The words are read
        through a memoryview, which runs less code than numpy: after a long wait, code must first be
        loaded into the CPU's caches.
        """
        words, size = self._words, self._entry_words
        number = words[_READ]
        first = number % self.entries
        begin = RING_WORDS + first * size
        if words[begin + _SEQUENCE] != number + 1:
            return None
        launch = words[begin + _LAUNCH]
        # Entries are written in order: search the last one that is there and of the same launch.
        count, most = 1, self.entries - first
        while count < most:
            middle = (count + most + 1) // 2
            last = begin + (middle - 1) * size
            is_next = words[last + _SEQUENCE] == number + middle and words[last + _LAUNCH] == launch
            count, most = (middle, most) if is_next else (count, middle - 1)
        self._fence()
        # Only sequence numbers are certain before the fence: a launch may have been an old one.
        last = begin + (count - 1) * size
        if words[last + _LAUNCH] != words[begin + _LAUNCH]:
            count = 1
        copy = memoryview(bytearray(words[begin : begin + count * size])).cast("q")
        return StepBlock(copy, size, self._columns)

    def release(self, block: StepBlock) -> None:
        """Let the device write the entries of a block again. Call it when the block is kept."""
        self._fence()
        self._words[_READ] = block.number + len(block.offsets)


def _no_fence() -> None:
    """Do nothing: the host completes loads in order, and stores after earlier loads."""


def _fence() -> None:
    """Complete the loads before the call before all loads and stores after it.

    Python has no memory fence. The release of a lock waits for earlier accesses, later ones wait
    for its acquisition, and a release is completed before a later acquisition (Arm Architecture
    Reference Manual, B2.3, barrier-ordered-before). The first block releases the lock, the second
    one acquires it.
    """
    lock = Lock()
    with lock:
        pass
    with lock:
        pass


def logprobs_of(row: Sequence[int]) -> list[float]:
    """Return the log-probabilities of the new tokens in a report's row that has a word for each.

    Empty for a request without log-probabilities.
    """
    first = (len(row) + Report.TOKENS) // 2
    words = row[first : first + row[Report.NEW]]
    if not words or words[0] == NO_LOGPROB:
        return []
    values: list[float] = np.array(words, np.int32).view(np.float32).tolist()
    return values


def _request_report(row: Sequence[int]) -> RequestReport:
    return RequestReport(
        req_pool_index=row[Report.ROW],
        tokens=tuple(row[Report.TOKENS : Report.TOKENS + row[Report.NEW]]),
        num_accepted_tokens=row[Report.ACCEPTED],
        end=RequestEnd(row[Report.END]),
        logprobs=tuple(logprobs_of(row)),
    )
