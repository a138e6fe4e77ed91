"""Launches of recorded loops, in the order of a CUDA stream."""

from __future__ import annotations

from collections import deque
from typing import Protocol
from weakref import ref


class QueuedLoop(Protocol):
    """A loop that the host runs step by step."""

    def begin(self) -> None:
        """Run the prologue."""
        ...

    def run_body(self) -> bool:
        """Run the next body, and return whether another one follows."""
        ...


class _Launch:
    """A launch of a loop. The loop may be dropped before it ends.

    Attributes:
        has_begun: Whether the prologue has run.
    """

    def __init__(self, loop: QueuedLoop) -> None:
        self.loop, self.has_begun = ref(loop), False


class LoopQueue:
    """The launches of a recorder's loops that have not ended, the oldest first.

    The oldest one runs a body whenever the host waits for it, so that results arrive one after the
    other, as from a device. Everything else of the recorder waits for all of them.
    """

    def __init__(self) -> None:
        self._launches: deque[_Launch] = deque()

    def launch(self, loop: QueuedLoop) -> None:
        """Begin a loop, or let it wait for the end of the launches before."""
        launch = _Launch(loop)
        if self._oldest() is None:
            loop.begin()
            launch.has_begun = True
        self._launches.append(launch)

    def advance(self) -> None:
        """Run the next body of the oldest launch, if there is one."""
        loop = self._oldest()
        if loop is None:
            return
        launch = self._launches[0]
        if not launch.has_begun:
            loop.begin()
            launch.has_begun = True
        if not loop.run_body():
            self._launches.popleft()

    def finish(self) -> None:
        """Run bodies until all launches have ended."""
        while self._launches:
            self.advance()

    def remove(self, loop: QueuedLoop) -> None:
        """Remove the launches of a loop."""
        self._launches = deque(each for each in self._launches if each.loop() is not loop)

    def _oldest(self) -> QueuedLoop | None:
        """Return the loop of the oldest launch, and forget launches whose loop was dropped."""
        while self._launches:
            loop = self._launches[0].loop()
            if loop is not None:
                return loop
            self._launches.popleft()
        return None
