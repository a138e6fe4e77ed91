"""Heartbeats: a thread of each rank writes them, and waiting ranks read those of the others.

torchrun has a heartbeat between nodes, not between ranks. A rank that waits for its device, in a
graph with collectives of NCCL, learns from heartbeats alone that another rank was killed or is
behind.
"""

from __future__ import annotations

import atexit
import math
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from graphkit.distributed.rank_store import Failure, RankStore, names_of_ranks

INTERVAL_S = 0.25
"""Time between heartbeats, each of which is one write to the store."""
SILENT_S = 1.0
"""Time without a heartbeat after which a rank has ended: four intervals, as threads may be late."""
DRAIN_S = 2.0
"""How long the work of a call may take to end by itself after another rank has failed."""
_TOPIC = "heartbeat"
_CLOSED = ""
"""Last heartbeat of a rank that closed its group. Its process may go on."""
_running: weakref.WeakSet[Heartbeat] = weakref.WeakSet()


class RankProgress(NamedTuple):
    """Number of calls that a rank has made. A rank with a smaller one is behind.

    Attributes:
        waits: Calls in which each rank waits for all others.
        runs: Begins and ends of other calls that all ranks make, since the last of ``waits``.
        collectives: Collectives of the process group.
    """

    waits: int = 0
    runs: int = 0
    collectives: int = 0


class Heartbeat:
    """A thread that calls ``on_beat`` at intervals.

    The thread ends when ``on_beat`` returns false, when the object of that method is collected, and
    before the interpreter exits.

    Args:
        store: The store; the thread gets a connection of its own.
        on_beat: A method. Its arguments are the thread's store and the number of the heartbeat.
    """

    def __init__(self, store: RankStore, on_beat: Callable[[RankStore, int], bool]) -> None:
        self._wakes, self._ends = threading.Event(), threading.Event()
        # The thread refers to this object: ``_close_all`` finds it until the thread has ended.
        self._thread = threading.Thread(
            target=self._beat,
            args=(store.clone(), weakref.WeakMethod(on_beat)),
            name="graphkit heartbeat",
            daemon=True,
        )
        self._thread.start()
        _running.add(self)

    def wake(self) -> None:
        """Start the next call without waiting for the end of the interval."""
        self._wakes.set()

    def close(self) -> None:
        """End the thread."""
        self._ends.set()
        self._wakes.set()
        self._thread.join(2 * SILENT_S)

    def _beat(self, store: RankStore, on_beat: weakref.WeakMethod[Any]) -> None:
        number = 0
        while not self._ends.is_set():
            number += 1
            method = on_beat()
            if method is None or not method(store, number):
                store.write(_TOPIC, _CLOSED)
                return
            del method
            self._wakes.wait(INTERVAL_S)
            self._wakes.clear()


class LivenessCheck:
    """Ranks that write no heartbeat after the creation of this object."""

    def __init__(self, store: RankStore, ranks: Sequence[int]) -> None:
        self._store, self.began = store, time.monotonic()
        self._before = {rank: store.read(_TOPIC, rank) for rank in ranks}

    def silent(self) -> tuple[int, ...]:
        """Return the ranks that have written no heartbeat so far."""
        return tuple(
            rank
            for rank, before in self._before.items()
            if before != _CLOSED and self._store.read(_TOPIC, rank) == before
        )

    def wait(self, is_done: Callable[[], bool]) -> tuple[int, ...]:
        """Return the ranks that have written no heartbeat ``SILENT_S`` after creation."""
        while silent := self.silent():
            is_over = time.monotonic() > self.began + SILENT_S
            if is_over or self._store.is_gone or is_done():
                break
            time.sleep(INTERVAL_S / 10)
        return silent

    def progress(self) -> dict[int, RankProgress]:
        """Return the progress of each rank at its last heartbeat; zeros if it closed the group."""
        beats = {rank: self._store.read(_TOPIC, rank) or _CLOSED for rank in self._before}
        return {rank: RankProgress(*map(int, beat.split()[1:])) for rank, beat in beats.items()}


@dataclass
class _Stall:
    """A period in which neither the progress of this rank nor the topic of its call changes."""

    state: tuple[RankProgress, str | None]
    since: float
    refused_at: float | None = None  # first heartbeat after another rank refused the call
    liveness: LivenessCheck | None = None


class StallDetector:
    """Finds the failure of another rank because of which this one makes no progress.

    Such a rank may wait for its device outside of any call, and a graph with NCCL collectives has
    no time limit. Costs no reads of the store while a rank makes progress.
    """

    def __init__(self, rank: int, others: Sequence[int], time_limit: float) -> None:
        self._rank, self._others, self._time_limit = rank, others, time_limit
        self._stall = _Stall((RankProgress(), None), time.monotonic())

    def failure(
        self, store: RankStore, progress: RankProgress, topic: str | None
    ) -> Failure | None:
        """Return the failure, if there is one. Call this function at each heartbeat.

        ``topic`` is that of failures that end the call of this rank, if it is in one.
        """
        now = time.monotonic()
        if (progress, topic) != self._stall.state:
            self._stall = _Stall((progress, topic), now)
        stall = self._stall
        refusal = None if topic is None else store.failure(topic)
        if refusal is not None:
            stall.refused_at = now if stall.refused_at is None else stall.refused_at
            return refusal if now - stall.refused_at > DRAIN_S else None
        if stall.liveness is None:
            if now - stall.since > self._time_limit / 2:
                stall.liveness = LivenessCheck(store, self._others)
        elif now > max(stall.since + self._time_limit, stall.liveness.began + SILENT_S):
            stall.since = math.inf  # check once
            return self._missing(stall.liveness, progress)
        return None

    def _missing(self, liveness: LivenessCheck, own: RankProgress) -> Failure | None:
        """Return the failure of ranks that ended, or that are behind.

        Other ranks may wait for rank 0 without a time limit, see ``Channel.broadcast``. They find
        no rank that has made fewer waits. A rank that closed the group is not behind.
        """
        silent = liveness.silent()
        late = [
            rank
            for rank, other in liveness.progress().items()
            if RankProgress() < other < own and (self._rank == 0 or other.waits == own.waits)
        ]
        return missing_ranks(silent, late, self._time_limit) if silent or late else None


def missing_ranks(silent: Sequence[int], late: Sequence[int], time_limit: float) -> Failure:
    """Return the failure of ranks that ended, or else of late ones."""
    if silent:
        text = f"{names_of_ranks(silent)} ended: no heartbeat for {SILENT_S:g} s"
        return Failure(tuple(silent), text)
    text = f"{names_of_ranks(late)} did not arrive within {time_limit:g} s"
    return Failure(tuple(late), text, is_late=True)


def write_heartbeat(store: RankStore, number: int, progress: RankProgress) -> None:
    """Write a numbered heartbeat of this rank."""
    store.write(_TOPIC, " ".join(map(str, (number, *progress))))


@atexit.register
def _close_all() -> None:
    """End all threads: one that returns from C++ while the interpreter exits aborts the process."""
    for heartbeat in list(_running):
        heartbeat.close()
