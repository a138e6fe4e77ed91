"""Notes that ranks leave for each other."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from graphkit.distributed.rank_store import RankStore


class SlowStore:
    """A store on a busy machine: no answer takes less than 10 ms."""

    def __init__(self):
        self._store = dist.HashStore()
        self.set, self.get, self.check = self._store.set, self._store.get, self._store.check

    def wait(self, keys, timeout):
        if timeout < timedelta(milliseconds=10):
            raise dist.DistStoreError("wait timeout")
        self._store.wait(keys, timeout)


def test_a_note_that_is_there_is_found_after_a_rank_that_takes_all_the_time():
    store = SlowStore()
    RankStore(store, 2).write("topic", "here")
    assert RankStore(store, 0).gather("topic", [1, 2], 0.05) == {2: "here"}
