"""planned -> captured -> closed: what each verb does in each state."""

from __future__ import annotations

import gc

import pytest
from torch.multiprocessing.reductions import StorageWeakRef

from graphkit import ReplayError, ReplayStats
from graphkit.runners import Reason

NOTHING = ReplayStats(replays=0, padded_rows=0, fallbacks={}, replays_by_size={})
NEEDS_A_GRAPH = {
    "replay": lambda runner, batch: runner.replay(batch),
    "stage": lambda runner, batch: runner.stage(2),
    "observe": lambda runner, batch: runner.observe(lambda launch: launch()),
    "graphs": lambda runner, batch: runner.graphs,
}


@pytest.mark.parametrize("verb", NEEDS_A_GRAPH)
def test_planned_refuses(make_runner, make_batch, verb):
    runner = make_runner()
    with pytest.raises(ReplayError, match=r"is planned.*Call capture\(\) first"):
        NEEDS_A_GRAPH[verb](runner, make_batch(2))
    assert runner.status == "planned"


def test_planned_runs_eagerly_and_says_why(make_runner, make_batch, expect, assert_same):
    runner, batch = make_runner(), make_batch(2)
    assert runner.stats == NOTHING
    decision = runner.can_replay(batch)
    assert (decision.ok, decision.kind) == (False, Reason.NOT_CAPTURED)
    assert_same(runner.fall_back(batch), expect(batch))
    assert_same(runner.run(batch), expect(batch))
    assert runner.stats.fallbacks == {"not captured": 1}


def test_captured_takes_every_verb_but_capture(runner, make_batch, expect, assert_same):
    batch = make_batch(3)
    assert runner.status == "captured"
    assert runner.can_replay(batch)
    for way in (runner.replay, runner.run, runner.fall_back):
        assert_same(way(batch), expect(batch))
    with pytest.raises(
        ReplayError, match=r"capture\(\) needs a planned runner, but this one is captured"
    ):
        runner.capture()
    assert_same(runner.replay(batch), expect(batch))


@pytest.mark.parametrize("verb", NEEDS_A_GRAPH)
def test_closed_refuses(runner, make_batch, verb):
    runner.close()
    with pytest.raises(ReplayError, match=r"is closed.*Create a new runner"):
        NEEDS_A_GRAPH[verb](runner, make_batch(2))


def test_closed_runs_nothing_but_still_answers(runner, make_batch, expect, assert_same):
    batch = make_batch(3)
    runner.replay(batch)
    runner.close()
    runner.close()
    assert runner.status == "closed"
    with pytest.raises(ReplayError, match="closed"):
        runner.run(batch)
    with pytest.raises(ReplayError, match="is closed"):
        runner.capture()
    decision = runner.can_replay(batch)
    assert (decision.ok, decision.kind) == (False, Reason.CLOSED)
    assert "closed" in decision.reason
    assert (runner.stats.replays, runner.stats.fallbacks) == (1, {})
    assert_same(runner.fall_back(batch), expect(batch))


def test_a_planned_runner_may_be_closed(make_runner):
    runner = make_runner()
    runner.close()
    with pytest.raises(ReplayError, match="is closed"):
        runner.capture()


def test_leaving_the_context_closes(make_runner):
    with make_runner() as runner:
        runner.capture()
    assert runner.status == "closed"
    runner = make_runner()

    def stumble():
        with runner:
            runner.capture()
            raise KeyError

    with pytest.raises(KeyError):
        stumble()
    assert runner.status == "closed"


def test_closing_gives_memory_back(make_runner, model):
    made = []

    def forward(inputs):
        between = inputs.input_ids + 1
        made.append(StorageWeakRef(between.untyped_storage()))
        return model(inputs)

    runner = make_runner(forward)
    runner.capture()
    gc.collect()
    assert sum(not storage.expired() for storage in made) == 3
    runner.close()
    gc.collect()
    assert all(storage.expired() for storage in made)


def test_a_runner_may_be_captured_while_replays_are_not_counted(make_runner, make_batch):
    runner = make_runner()
    with runner.without_stats():
        runner.capture()
        runner.replay(make_batch(2))
    runner.replay(make_batch(3))
    assert (runner.stats.replays, runner.stats.live_sizes) == (1, {3: 1})


def test_replays_that_are_not_counted_leave_the_counts_of_their_plans(runner, make_batch):
    runner.replay(make_batch(2))
    with runner.without_stats():
        runner.replay(make_batch(2))
        runner.replay(make_batch(1))
    assert runner.stats.replays_by_size == {2: 1}
