"""Repeated replays on all ranks at once, because the collectives of a graph wait for every rank.

Ranks meet before each repetition and agree on what all of them run. A rank whose check has ended
runs what another one repeats, until the checks of all have ended. Meetings go through the store of
the process group: nothing waits on the device.
"""

from __future__ import annotations

from graphkit.audit.audit_log import NotChecked
from graphkit.distributed.rank_store import RankStore, names_of_ranks

REPLAY, BODY, END = "a replay", "the body", "the end"
"""What a rank wants to run at a meeting; ``END`` if its check has ended."""
WAIT_S = 10.0
"""How long a rank waits for the others. They look at memory of their own before they arrive."""


class Lockstep:
    """The meetings of a check of one replay.

    Args:
        store: Store of the process group.
        rank: This rank.
        size: Number of ranks.
        replay: Number of the check and of the replay, and name of the graph: the same on all ranks
            that check it.

    Attributes:
        has_missed: Whether a rank did not arrive.
    """

    def __init__(self, store: RankStore, rank: int, size: int, replay: str) -> None:
        self._store, self._rank, self._size, self._replay = store, rank, size, replay
        self._count, self._is_over, self.has_missed = 0, False, False

    def meet(self, wanted: str) -> str:
        """Wait for all ranks, and return what all of them run: what one wants, or ``END``.

        Raises:
            NotChecked: A rank did not arrive, has left, or wants to run something else.
        """
        if self._is_over:
            raise NotChecked("the ranks no longer check this replay together")
        topic = f"check {self._replay}, {self._count}"
        self._count += 1
        self._store.write(topic, wanted)
        others = [rank for rank in range(self._size) if rank != self._rank]
        texts = self._store.gather(topic, others, WAIT_S)
        runs = {wanted, *texts.values()} - {END}
        missing = names_of_ranks([rank for rank in others if rank not in texts])
        reason = f"{missing} did not check it within {WAIT_S:g} s" if missing else ""
        if len(runs) > 1:
            reason = f"the ranks would run {' and '.join(sorted(runs))}"
        # Ranks that arrive late see all others: the first decision holds for all.
        decided = self._store.decide(topic, reason)
        if decided:
            self._is_over, self.has_missed = True, bool(missing)
            raise NotChecked(f"its collectives need all ranks, and {decided}")
        return runs.pop() if runs else END

    def leave(self, reason: str) -> None:
        """Let the other ranks not wait for this one."""
        if not self._is_over:
            self._is_over = True
            topic = f"check {self._replay}, {self._count}"
            self._store.decide(topic, f"rank {self._rank} cannot: {reason}")
            self._store.write(topic, END)
