"""Mailbox: the ring in pinned memory through which the host passes each batch to the graph.

``graphkit.ops.refresh`` documents its layout.

The host may write an entry once the device has consumed its previous content. It compares two
numbers in plain memory, and waits only while every entry is in flight. Hosts that reorder loads,
such as Arm's, need no memory fence for this: the host writes an entry after a branch on what it has
read, and stores are not moved before such a branch.

A launch is counted by one assignment, in ``commit``. An exception at any line before it, such as a
``KeyboardInterrupt`` after the driver has launched the graph, leaves the entry posted but not
committed. The next ``claim`` then waits for the device and continues behind the last entry that
the device has read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray

from graphkit.buffers.layout import FieldLayout, entry_bytes
from graphkit.errors import ReplayError
from graphkit.ops.inference import allocates
from graphkit.ops.refresh import FROM_PAYLOAD, RING_WORDS, Header, Ring

ENTRIES = 4
"""Number of batches that the host can write before the device has read the first."""
# Plain ints: indexing by an enum costs a replay more than writing the word.
_CONSUMED, _FAULT = int(Ring.CONSUMED), int(Ring.FAULT)
_SEQUENCE, _REQUESTS, _TOKENS, _HAS_ROWS = (
    int(Header.SEQUENCE), int(Header.REQUESTS), int(Header.TOKENS), int(Header.HAS_ROWS),
)  # fmt: skip
_CHECK_EVERY = 1024
"""Turns of a wait between checks of the device and the clock, which cost more than a turn."""
_GIVE_UP_S = 60.0
"""Longest wait for the device: longer than steps take, so that only endless work exceeds it."""


class Mailbox:
    """A ring of entries in memory that host and device share. One thread at a time may use it.

    Args:
        layouts: Layouts of the fields.
        device: Device that reads the ring; the memory is pinned for CUDA.
        check_device: Called while waiting; see ``Backend.check_device``.
        wait_for_device: Waits until the device has finished all launches.

    Attributes:
        ring: The ring, int64.
        device_sequence: Number of the entry that the device reads next, int64 [1] on the device.
    """

    def __init__(
        self,
        layouts: Sequence[FieldLayout],
        device: torch.device,
        check_device: Callable[[], None] = lambda: None,
        wait_for_device: Callable[[], None] = lambda: None,
    ) -> None:
        self.entry_words = entry_bytes(layouts) // 8
        size = RING_WORDS + ENTRIES * self.entry_words
        self.ring = torch.zeros(size, dtype=torch.int64, pin_memory=device.type == "cuda")
        self.device_sequence = torch.zeros(1, dtype=torch.int64, device=device)
        self.sequence = 0
        """Number of the next replay; its entry is ``sequence % ENTRIES``."""
        self.claims = 0
        """Changes with every claim, with the replay of a staged batch, and when the runner closes.
        A claimed entry belongs to its claimant until then."""
        self._posted = -1
        """Number of the entry that was posted last."""
        self._check_device, self._wait_for_device = check_device, wait_for_device
        self._words = memoryview(self.ring.numpy())  # type: ignore[arg-type]
        begins = range(RING_WORDS, size, self.entry_words)
        self._entries = tuple(self._words[begin : begin + self.entry_words] for begin in begins)
        bodies = self.ring[RING_WORDS:].view(ENTRIES, self.entry_words)[:, Header.SOURCES :]
        self._bodies = tuple(body.numpy() for body in bodies)
        self._pointed: tuple[list[int], ...] = tuple([] for _ in range(ENTRIES))
        self._in_flight: list[Any] = [None] * (ENTRIES + 1)
        self._staging: dict[tuple[int, str], torch.Tensor] = {}

    def entry(self, index: int) -> torch.Tensor:
        """Return an entry's words, int64."""
        return self.ring[RING_WORDS:].view(ENTRIES, self.entry_words)[index]

    def words(self, index: int) -> memoryview:
        """Return an entry's words, for the host to read and write one at a time."""
        return self._entries[index]

    def claim(self) -> int:
        """Return the index of the entry to write next. Waits until the device has read it.

        Waits for the device after a launch that raised an exception.

        Raises:
            ReplayError: The device read an entry out of turn, or stopped consuming entries.
        """
        if self._posted == self.sequence:  # the launch of this entry raised an exception
            self._wait_for_device()
            self.rewind()
        sequence = self.sequence
        if sequence - self._words[_CONSUMED] >= ENTRIES:
            self._wait(sequence)
        if self._words[_FAULT]:
            self._report_fault()
        self.claims += 1
        index = sequence % ENTRIES
        if self._pointed[index]:
            self._forget_addresses(index)
        return index

    def point(self, index: int, word: int, address: int) -> None:
        """Set an address as the source of a segment, until the entry is claimed again."""
        if address != FROM_PAYLOAD:
            self._pointed[index].append(word)  # first, in case of an interrupt
        self._entries[index][word] = address

    def fill(self, index: int, words: NDArray[np.int64]) -> None:
        """Write the sources and the payload of an entry."""
        self._bodies[index][:] = words

    def post(self, index: int, requests: int, tokens: int, has_rows: int = 1) -> None:
        """Write the header of an entry whose rows are written; ``has_rows`` is 0 without rows."""
        self._posted = self.sequence
        words = self._entries[index]
        words[_SEQUENCE] = self.sequence
        words[_REQUESTS] = requests
        words[_TOKENS] = tokens
        words[_HAS_ROWS] = has_rows

    def commit(self, in_flight: Any = None) -> None:
        """Count a launch, and keep the tensors that it reads alive until the device has read them.

        The refresh marks an entry as consumed when it has fetched it, and reads the addresses in it
        right after. So the launch before the one that consumed this entry has finished its reads.

        Args:
            in_flight: Tensors that the launch reads.
        """
        self._in_flight[self.sequence % (ENTRIES + 1)] = in_flight
        self.sequence += 1

    def rewind(self) -> None:
        """Continue behind the last entry that the device has read. The device must be idle."""
        self.sequence = self._words[_CONSUMED] = int(self.device_sequence)
        self._words[_FAULT] = 0
        self._posted = -1

    def unread(self) -> None:
        """Return the entry that was read last to the device. The device must be idle."""
        self.device_sequence.sub_(1)
        self._words[_CONSUMED] -= 1

    def staging(self, layout: FieldLayout) -> torch.Tensor:
        """Return memory that the device can read, for host rows of a field without payload.

        Allocated at its first use. Valid as long as the tensors that ``commit`` keeps.

        Shapes:
            result: ``layout.shape(layout.capacity)``.
        """
        key = (self.sequence % (ENTRIES + 1), layout.name)
        if key not in self._staging:
            self._staging[key] = allocates(torch.empty)(
                layout.shape(layout.capacity), dtype=layout.dtype, pin_memory=self.ring.is_pinned()
            )
        return self._staging[key]

    def _forget_addresses(self, index: int) -> None:
        for word in self._pointed[index]:
            self._entries[index][word] = FROM_PAYLOAD
        self._pointed[index].clear()

    def _report_fault(self) -> NoReturn:
        """Raise for a replay that read another entry than its own. Waits for the device.

        Later replays read their own entries.
        """
        number = self._words[_FAULT] - 1
        self._wait_for_device()
        self.rewind()
        raise ReplayError(
            f"replay {number} read the mailbox entry of another replay, and its output is wrong. "
            "Two threads or processes use one runner, or a graph was replayed without it: create a "
            "runner for each, and replay graphs through it."
        )

    def _wait(self, sequence: int) -> None:
        began, turns = time.monotonic(), 0
        while sequence - self._words[_CONSUMED] >= ENTRIES:
            turns += 1
            if turns % _CHECK_EVERY == 0:
                self._check_device()
                if time.monotonic() - began > _GIVE_UP_S:
                    raise ReplayError(
                        f"the device consumed no mailbox entry for {_GIVE_UP_S:.0f} s, and "
                        f"{ENTRIES} batches wait for earlier work of the stream. Look for a loop "
                        "that runs on (stop its stream, or launch fewer steps), a kernel that does "
                        "not end, or an event that is never recorded."
                    )
            time.sleep(0)
