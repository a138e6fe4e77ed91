"""Short texts that ranks leave for each other in the store of their process group."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store  # torch.distributed.Store, without its stub


class Notes:
    """Notes of ranks, by topic. A note is written once and may be read by all.

    Reading needs no call of the writer, so a rank that waits for another one finds out why that
    one does not come.

    Args:
        store: Store of the ranks' process group.
        rank: Rank of this process.
    """

    def __init__(self, store: Store, rank: int) -> None:
        self._store, self._rank = store, rank

    def write(self, topic: str, text: str) -> None:
        """Leave a note. Does nothing if the store is gone: the process that hosts it has ended."""
        try:
            self._store.set(_key(topic, self._rank), text)
        except RuntimeError:
            return

    def read(self, topic: str, rank: int) -> str | None:
        """Return the note of a rank; ``None`` if there is none yet, or the store is gone."""
        try:
            key = _key(topic, rank)
            return self._store.get(key).decode() if self._store.check([key]) else None
        except RuntimeError:
            return None

    def gather(self, topic: str, ranks: Iterable[int], seconds: float) -> dict[int, str]:
        """Wait for the notes of several ranks, and return those that came in time."""
        deadline, found = time.monotonic() + seconds, {}
        for rank in ranks:
            left = max(deadline - time.monotonic(), 0.001)
            with suppress(RuntimeError):  # a note that is there may take longer to be found
                self._store.wait([_key(topic, rank)], timedelta(seconds=left))
            text = self.read(topic, rank)
            if text is not None:
                found[rank] = text
        return found


def _key(topic: str, rank: int) -> str:
    return f"graphkit/{topic}/{rank}"
