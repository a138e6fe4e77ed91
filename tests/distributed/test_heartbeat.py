"""Failures that ranks find in the heartbeats of others, at times of a clock that tests set."""

from __future__ import annotations

import gc
import threading

import pytest
import torch.distributed as dist

from graphkit.distributed import heartbeat
from graphkit.distributed.heartbeat import Heartbeat, RankProgress, StallDetector, write_heartbeat
from graphkit.distributed.rank_store import Failure, RankStore

LIMIT_S = 60.0
OWN = RankProgress(waits=3, runs=2, collectives=5)


class Ranks:
    """A rank that makes no progress, and the heartbeats of two others."""

    def __init__(self, monkeypatch, rank=0):
        self.now = 0.0
        monkeypatch.setattr(heartbeat.time, "monotonic", lambda: self.now)
        store = dist.HashStore()
        others = [other for other in range(3) if other != rank]
        self.stores = [RankStore(store, each) for each in (rank, *others)]
        self._detector = StallDetector(rank, others, LIMIT_S)

    def beat(self, *others):
        for store, progress in zip(self.stores[1:], others, strict=True):
            if progress is not None:
                write_heartbeat(store, int(self.now), progress)

    def failure(self, at, own=OWN, topic=None):
        self.now = at
        return self._detector.failure(self.stores[0], own, topic)

    def failure_of(self, *others):
        """Return the failure at the time limit, and check that there is none before."""
        for at in (0.0, 31.0, 59.0):
            self.beat(*others)
            assert self.failure(at) is None
        self.beat(*others)
        return self.failure(61.0)


@pytest.fixture
def ranks(monkeypatch):
    return Ranks(monkeypatch)


@pytest.mark.parametrize("place", [{"runs": 1, "collectives": 9}, {"collectives": 4}])
def test_a_rank_that_is_behind_is_late(ranks, place):
    failure = ranks.failure_of(OWN, OWN._replace(**place))
    assert (failure.ranks, failure.is_late) == ((2,), True)
    assert failure.text == "rank 2 did not arrive within 60 s"


def test_ranks_that_have_made_the_same_calls_may_be_idle(ranks):
    assert ranks.failure_of(OWN, OWN) is None
    ranks.beat(OWN, OWN._replace(runs=1))
    assert ranks.failure(200.0) is None, "ranks are compared once"


def test_rank_0_may_be_idle_while_others_wait_for_its_messages(monkeypatch):
    ranks = Ranks(monkeypatch, rank=2)
    assert ranks.failure_of(RankProgress(waits=2, runs=9), OWN) is None


def test_a_rank_that_takes_no_message_of_rank_0_is_late(ranks):
    failure = ranks.failure_of(OWN, RankProgress(waits=2, runs=9))
    assert (failure.ranks, failure.is_late) == ((2,), True)


def test_a_rank_without_heartbeats_has_ended(ranks):
    ranks.beat(OWN, OWN)
    failure = ranks.failure_of(OWN, None)
    assert (failure.ranks, failure.is_late) == ((2,), False)
    assert failure.text == "rank 2 ended: no heartbeat for 1 s"


def test_progress_starts_the_time_anew(ranks):
    assert ranks.failure(0.0) is None
    assert ranks.failure(59.0, own=OWN._replace(runs=3)) is None
    assert ranks.failure(90.0, own=OWN._replace(runs=3)) is None
    assert ranks.failure(118.0, own=OWN._replace(runs=3)) is None
    assert ranks.failure(120.0, own=OWN._replace(runs=3)).ranks == (1, 2)


def test_a_refused_call_ends_the_rank_that_waits_in_it(ranks):
    refusal = Failure((1,), "rank 1 refused its batch: InputError: x", at=0.0)
    assert ranks.failure(10.0, topic="refusal 1") is None
    ranks.stores[1].report("refusal 1", refusal)
    assert ranks.failure(20.0, topic="refusal 1") is None
    assert ranks.failure(21.0, topic="refusal 1") is None
    assert ranks.failure(22.5, topic="refusal 1") == refusal


def test_a_rank_that_closed_its_group_has_not_ended(ranks):
    class Owner:
        def on_beat(self, _store, _number):
            return False  # as a group does that is collected or whose process group is destroyed

    owner = Owner()
    Heartbeat(ranks.stores[2], owner.on_beat).close()
    assert ranks.failure_of(OWN, None) is None


def test_the_interpreter_exits_after_the_threads_of_collected_groups():
    """One of them may be in a call of the store, which is C++."""

    class SlowStore:
        def __init__(self):
            self.is_called, self.may_return = threading.Event(), threading.Event()

        def clone(self):
            return self

        def write(self, _topic, _value):
            self.is_called.set()
            self.may_return.wait()

    class Owner:
        def on_beat(self, _store, _number):
            return False

    store, owner, before = SlowStore(), Owner(), set(threading.enumerate())
    Heartbeat(store, owner.on_beat)  # nothing refers to it
    gc.collect()
    assert store.is_called.wait(10)
    (thread,) = set(threading.enumerate()) - before
    threading.Timer(0.2, store.may_return.set).start()
    heartbeat._close_all()
    assert not thread.is_alive()
