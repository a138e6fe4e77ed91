"""Texts and failures that ranks write for each other into the store of their process group.

The store is torch's. Reads here do not block, and end where the process that hosts it has ended.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, TypeVar

from graphkit.errors import RankError

if TYPE_CHECKING:
    # torch.distributed.Store, which is not in its stub.
    from torch._C._distributed_c10d import Store as Store

ValueT = TypeVar("ValueT")
FAILURE = "failure"
"""Topic of the failure that ends a group.

A rank looks for failures under the topic of its own call: this one, "refusal N" of a call that a
rank refuses before it waits for others, or ``failure_of_wait`` of one wait.
"""
_PAUSES_S = 2e-4, 2e-2
"""First and longest pause between reads, each twice as long as the one before.

``Store.wait`` does not serve here: it logs a warning when its time limit ends.
"""


@dataclass(frozen=True, slots=True)
class Failure:
    """A failure of ranks, as all ranks report it.

    Attributes:
        ranks: Ranks that failed; empty if they are not known.
        text: What happened, with the ranks, as a sentence.
        is_late: Whether the other ranks waited for these ranks until the time limit.
        details: Further data of the topic.
        at: Time of the failure, in seconds since the epoch.
    """

    ranks: tuple[int, ...]
    text: str
    is_late: bool = False
    details: str = ""
    at: float = field(default_factory=time.time)

    def error(self, rank: int) -> RankError:
        """Return the error that a rank raises."""
        if self.is_late and rank in self.ranks:
            late = max(time.time() - self.at, 0.0)
            text = f"this rank arrived {late:.1f} s late: {self.text}, and the other ranks gave up"
            return RankError(f"{text}.", ranks=self.ranks)
        return RankError(f"{self.text.removesuffix('.')}.", ranks=self.ranks)


def failure_of_wait(number: int) -> str:
    """Return the topic of a failure that ends the call with these ``waits``, not the group."""
    return f"failure of wait {number}"


def names_of_ranks(ranks: Sequence[int]) -> str:
    """Return ranks in words: ``rank 1 and rank 2``."""
    return " and ".join(f"rank {rank}" for rank in ranks)


class RankStore:
    """Texts and failures of ranks, by topic.

    A read does not involve the writer, so that a rank that waits finds out why another one does
    not arrive. If the process that hosts the store has ended, nothing is read or written, and
    ``is_gone`` is true from then on. One thread at a time may use a store; see ``clone``.

    Attributes:
        is_gone: Whether the store did not answer.
    """

    def __init__(self, store: Store, rank: int) -> None:
        self._store, self._rank = store, rank
        self.is_gone = False

    def clone(self) -> RankStore:
        """Return the same store with a connection of its own, for another thread."""
        store: Store = self._store.clone()  # type: ignore[attr-defined]  # not in torch's stub
        return RankStore(store, self._rank)

    def write(self, topic: str, text: str) -> None:
        """Write the text of this rank."""
        self._try(lambda: self._store.set(_key(topic, self._rank), text), None)

    def read(self, topic: str, rank: int) -> str | None:
        """Return the text of a rank; ``None`` if there is none yet."""
        return self._read(_key(topic, rank))

    def gather(self, topic: str, ranks: Iterable[int], seconds: float) -> dict[int, str]:
        """Wait for the texts of several ranks, and return the ones that exist in time."""
        deadline, pause = time.monotonic() + seconds, _PAUSES_S[0]
        missing, texts = list(ranks), dict[int, str]()
        while True:
            for rank in list(missing):
                text = self.read(topic, rank)
                if text is not None:
                    texts[rank] = text
                    missing.remove(rank)
            left = deadline - time.monotonic()
            if not missing or left <= 0 or self.is_gone:
                return texts
            time.sleep(min(pause, left))
            pause = min(2 * pause, _PAUSES_S[1])

    def report(self, topic: str, failure: Failure) -> Failure:
        """Report a failure, and return the first one that a rank reported under this topic."""
        text = json.dumps(asdict(failure))
        first = self._try(lambda: self._store.compare_set(_key(topic), "", text), text.encode())
        return _failure(first)

    def failure(self, topic: str) -> Failure | None:
        """Return the first failure that a rank reported under a topic, if any."""
        text = self._read(_key(topic))
        return None if text is None else _failure(text)

    def _read(self, key: str) -> str | None:
        def text() -> str | None:
            return self._store.get(key).decode() if self._store.check([key]) else None

        return self._try(text, None)

    def _try(self, call: Callable[[], ValueT], default: ValueT) -> ValueT:
        if not self.is_gone:
            try:
                return call()
            except RuntimeError:  # torch.distributed.DistNetworkError, or another store's error
                self.is_gone = True
        return default


def _key(topic: str, rank: int | None = None) -> str:
    return f"graphkit/{topic}" if rank is None else f"graphkit/{topic}/{rank}"


def _failure(text: str | bytes) -> Failure:
    values = json.loads(text)
    return Failure(tuple(values.pop("ranks")), **values)
