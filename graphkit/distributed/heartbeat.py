"""A thread of each rank that says that the rank lives, and notices failures of other ranks."""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from graphkit.distributed.rank_store import RankStore

INTERVAL_S = 0.25
SILENT_S = 1.0
"""A rank that wrote no beat for so long has ended."""
Progress = tuple[int, int]
"""Calls of a rank that all ranks make, and collectives of its forwards."""
_TOPIC = "heartbeat"
_running: weakref.WeakSet[Heartbeat] = weakref.WeakSet()


class Heartbeat:
    """Writes a beat into the store at intervals, and calls ``on_beat`` after it.

    The thread ends when ``on_beat`` returns false, when the object of that method is collected, and
    before the interpreter exits.

    Args:
        store: The store; the thread gets a connection of its own.
        on_beat: A method, called with the thread's store and the number of the beat.
    """

    def __init__(self, store: RankStore, on_beat: Callable[[RankStore, int], bool]) -> None:
        self._wakes, self._ends = threading.Event(), threading.Event()
        self._thread = threading.Thread(
            target=_beat,
            args=(store.clone(), weakref.WeakMethod(on_beat), self._wakes, self._ends),
            name="graphkit heartbeat",
            daemon=True,
        )
        self._thread.start()
        _running.add(self)

    def wake(self) -> None:
        """Let the next beat come now."""
        self._wakes.set()

    def close(self) -> None:
        """End the thread."""
        self._ends.set()
        self._wakes.set()
        self._thread.join(2 * SILENT_S)


@atexit.register
def _close_all() -> None:
    """End all threads: one that returns from C++ while the interpreter exits aborts the process."""
    for each in list(_running):
        each.close()


def _beat(
    store: RankStore,
    on_beat: weakref.WeakMethod[Any],
    wakes: threading.Event,
    ends: threading.Event,
) -> None:
    number = 0
    while not ends.is_set():
        number += 1
        method = on_beat()
        if method is None or not method(store, number):
            return
        del method
        wakes.wait(INTERVAL_S)
        wakes.clear()


def write_beat(store: RankStore, number: int, progress: Progress) -> None:
    """Write a beat.

    Args:
        store: The thread's store.
        number: Number of the beat.
        progress: How far this rank has come.
    """
    store.write(_TOPIC, " ".join(map(str, (number, *progress))))


def roll_call(
    store: RankStore, ranks: Sequence[int], is_done: Callable[[], bool]
) -> tuple[tuple[int, ...], dict[int, Progress]]:
    """Return the ranks that are silent, and the progress of all.

    Waits until every rank has written a beat, or for ``SILENT_S``.

    Args:
        store: The store of the calling thread.
        ranks: The ranks to listen to.
        is_done: Whether to stop waiting, because a failure has been reported.
    """
    before = {rank: store.read(_TOPIC, rank) for rank in ranks}
    silent, deadline = list(ranks), time.monotonic() + SILENT_S
    while silent and time.monotonic() < deadline and not (store.is_gone or is_done()):
        time.sleep(INTERVAL_S / 10)
        silent = [rank for rank in silent if store.read(_TOPIC, rank) == before[rank]]
    last = {rank: (store.read(_TOPIC, rank) or "0 0 0").split() for rank in ranks}
    return tuple(silent), {rank: (int(words[1]), int(words[2])) for rank, words in last.items()}
