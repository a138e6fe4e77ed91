"""What ranks log: their group, the failure that ends it, and what they abort because of it."""

from __future__ import annotations

import logging

import pytest
import torch.distributed as dist

import graphkit as gk
from graphkit.distributed import connections
from rank_steps import runner, step


@pytest.fixture
def group(caplog):
    caplog.set_level(logging.INFO, logger="graphkit.distributed")
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield gk.RankGroup(time_limit=20.0)
    dist.destroy_process_group()


def logged(caplog):
    return [
        (record.name.removeprefix("graphkit.distributed."), record.levelname, record.getMessage())
        for record in caplog.records
        if record.name.startswith("graphkit.distributed")
    ]


def test_a_rank_logs_that_it_joined(group, caplog):
    gk.RankGroup(group.process_group)
    assert logged(caplog) == [("rank_group", "INFO", "Rank 0 of 1 joined its group.")]


def test_the_failure_that_ends_a_group_is_logged_once(group, caplog):
    caplog.clear()
    group.leave(LookupError("no such request."))
    with pytest.raises(gk.RankError):
        group.require_open()
    assert group._is_reported()
    text = "The group of rank 0 failed: rank 0 left the group after LookupError: no such request."
    assert logged(caplog) == [("failure_detector", "WARNING", text)]


def test_a_failed_capture_is_logged_with_its_cause(group, caplog):
    caplog.clear()

    def fail(inputs):
        step(inputs)
        raise LookupError("no weights")

    with pytest.raises(gk.CaptureError):
        runner(group, fail).capture()
    (record,) = logged(caplog)
    assert record[:2] == ("barrier_backend", "WARNING")
    assert "rank 0 failed in a capture" in record[2]
    assert "LookupError: no weights" in record[2]


def test_an_aborted_process_group_is_logged(monkeypatch, caplog):
    class OfNccl:
        was_aborted = False

        def rank(self):
            return 3

        def abort(self):
            self.was_aborted = True

    aborted = OfNccl()
    monkeypatch.setattr(connections, "uses_nccl", lambda process_group: process_group is aborted)
    connections.abort_nccl(aborted, 0.0, ())
    assert aborted.was_aborted
    assert logged(caplog) == [("connections", "WARNING", "Rank 3 aborts its NCCL process group.")]


def test_another_process_group_is_not_aborted(group, caplog):
    caplog.clear()
    connections.abort_nccl(group.process_group, 0.0, ())
    assert not logged(caplog)
