"""An error is raised after NCCL has been aborted: its receiver may destroy the process group."""

from __future__ import annotations

import threading
import time

import pytest
import torch.distributed as dist

import graphkit as gk
from graphkit.distributed import connections, failure_detector
from rank_steps import batch, captured


class Abort:
    """Stands for the abort of NCCL, on a thread of its own.

    Attributes:
        began, ended: Set when the abort begins and when it ends.
        may_end: Set by a test; the abort ends after it.
    """

    def __init__(self):
        self.began, self.may_end, self.ended = (threading.Event() for _ in range(3))

    def __call__(self, process_group, drain_s, graphs):
        time.sleep(0.2)  # the work that may end by itself
        self.began.set()
        self.may_end.wait()
        self.ended.set()


@pytest.fixture
def abort():
    return Abort()


@pytest.fixture
def group(monkeypatch, abort):
    monkeypatch.setattr(failure_detector, "uses_nccl", lambda _: True)
    monkeypatch.setattr(failure_detector, "abort_nccl", abort)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield gk.RankGroup()
    abort.may_end.set()
    if dist.is_initialized():
        dist.destroy_process_group()


def no_memory():
    raise MemoryError("no memory left")


def test_an_error_of_this_rank_follows_the_abort(group, abort):
    abort.may_end.set()
    with pytest.raises(MemoryError):
        group.guard(no_memory)
    assert abort.ended.is_set()


def test_the_failure_of_another_rank_follows_the_abort(group, abort):
    abort.may_end.set()
    group.store.report(failure_detector.FAILURE, failure_detector.Failure((1,), "rank 1 failed"))
    with pytest.raises(gk.RankError, match="rank 1 failed"):
        group.wait_until(lambda _: False)
    assert abort.ended.is_set()


def test_an_abort_that_waits_for_graphs_delays_one_error(group, abort, monkeypatch):
    monkeypatch.setattr(failure_detector, "_ABORT_S", 1.0)
    group.fail((0,), "rank 0 failed")
    assert abort.began.is_set()
    assert not abort.ended.is_set()
    waits = []
    monkeypatch.setattr(group._aborted, "wait", waits.append)
    with pytest.raises(gk.RankError):
        group.require_open()
    assert waits == [0]


def test_a_destroyed_group_has_nothing_to_abort(group, abort):
    dist.destroy_process_group()
    with pytest.raises(gk.ReplayError, match="destroyed"):
        group.require_open()
    group.leave(MemoryError())
    assert not abort.began.is_set()


class Communicator:
    """Stands for a process group of NCCL, whose abort ends after its graphs are destroyed."""

    def __init__(self, graphs):
        self._graphs, self.has_ended = graphs, False

    def rank(self):
        return 0

    def abort(self):
        self.has_ended = all(graph.is_closed.wait(10) for graph in self._graphs)


class Graph:
    def __init__(self):
        self.is_closed = threading.Event()
        self.close = self.is_closed.set


def test_an_abort_closes_the_graphs_that_it_waits_for(monkeypatch):
    monkeypatch.setattr(connections, "uses_nccl", lambda _: True)
    graphs = [Graph(), Graph()]
    communicator = Communicator(graphs)
    connections.abort_nccl(communicator, 0.0, graphs)
    assert communicator.has_ended


def test_a_group_knows_the_captured_graphs_of_its_rank(group):
    runner = captured(group)
    assert len(group.graphs) == len(runner.graphs)


def test_a_replay_of_a_graph_that_was_closed_raises_the_failure(group, abort):
    abort.may_end.set()
    runner = captured(group)

    def close_and_launch(launch):
        group.fail((0,), "rank 0 failed")
        for graph in group.graphs:
            graph.close()
        return launch()

    with runner.observe(close_and_launch), pytest.raises(gk.RankError, match="rank 0 failed"):
        runner.replay(batch(1))
