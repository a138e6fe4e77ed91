"""Texts and failures that ranks write for each other."""

from __future__ import annotations

import torch.distributed as dist

from graphkit.distributed.rank_store import Failure, RankStore


class GoneStore:
    """A store whose host has ended."""

    def __getattr__(self, name):
        def call(*_arguments):
            raise dist.DistNetworkError("Broken pipe")

        return call


def stores(count):
    store = dist.HashStore()
    return [RankStore(store, rank) for rank in range(count)]


def test_gather_returns_texts_although_another_rank_uses_up_the_time():
    first, _, third = stores(3)
    third.write("topic", "here")
    assert first.gather("topic", [1, 2], 0.05) == {2: "here"}


def test_all_ranks_read_the_first_failure():
    ranks = stores(3)
    assert ranks[0].failure("failure") is None
    earliest = Failure((2,), "rank 2 left the group after ValueError: x")
    assert ranks[2].report("failure", earliest) == earliest
    assert ranks[1].report("failure", Failure((1,), "rank 1 left, too")) == earliest
    assert ranks[0].failure("failure") == earliest
    assert ranks[0].failure("another topic") is None


def test_the_error_of_a_late_rank_says_so():
    failure = Failure((1,), "rank 1 did not arrive within 3 s", is_late=True, at=0.0)
    assert "this rank arrived" in str(failure.error(1))
    assert str(failure.error(0)) == "rank 1 did not arrive within 3 s."
    assert failure.error(0).ranks == (1,)


def test_a_store_whose_host_has_ended_returns_nothing():
    store, own = RankStore(GoneStore(), 1), Failure((1,), "rank 1 left")
    store.write("topic", "text")
    assert store.is_gone
    assert store.failure("failure") is None
    assert store.report("failure", own) == own
    assert store.gather("topic", [0], 60.0) == {}, "without waiting"
