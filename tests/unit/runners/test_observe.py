"""``observe``: every replay of a block passes through an observer."""

from __future__ import annotations

import pytest
import torch

from graphkit import ConfigError, ReplayError


def test_an_observer_sees_every_replay(
    runner, make_batch, expect, assert_same, assert_in_step, stage
):
    seen = []

    def observer(replay):
        seen.append((replay.batch_size, replay.padded_batch_size, replay.num_tokens))
        return replay()

    with runner.observe(observer):
        assert_same(runner.replay(make_batch(3)), expect(make_batch(3)))
        runner.run(make_batch(2, seed=1))
        stage(runner, make_batch(1)).replay()
        runner.replay(make_batch(0))
        runner.fall_back(make_batch(1))
    runner.replay(make_batch(4))
    assert seen == [(3, 4, 12), (2, 2, 8), (1, 1, 4)]
    assert runner.stats.replays == 4
    assert_in_step(runner)


def test_the_batch_can_be_read_before_the_launch(runner, make_batch, assert_in_step):
    batches = []

    def observer(replay):
        batches.append(replay.read_batch())
        batches.append(replay.read_batch())
        return replay()

    batch = make_batch(3, kind="mixed")
    alone = runner.replay(batch, clone=True)
    with runner.observe(observer):
        observed = runner.replay(batch)
    assert torch.equal(observed.hidden_states, alone.hidden_states)
    for read in batches:
        for name in ("req_pool_indices", "seq_lens", "input_ids", "positions", "out_cache_loc"):
            assert getattr(read, name).tolist() == getattr(batch, name).tolist()
    assert_in_step(runner)


def test_what_an_observer_returns_is_the_output(runner, make_batch):
    with runner.observe(lambda replay: replay().clone()):
        first = runner.replay(make_batch(2, seed=1))
        kept = first.hidden_states.clone()
        runner.replay(make_batch(2, seed=2))
    assert torch.equal(first.hidden_states, kept)


def test_observers_nest(runner, make_batch):
    order = []

    def observer(name):
        return lambda replay: (order.append(name), replay())[1]

    with runner.observe(observer("outer")), runner.observe(observer("inner")):
        runner.replay(make_batch(1))
    assert order == ["inner", "outer"]


def test_replays_that_are_not_counted_are_observed(runner, make_batch):
    seen = []

    def observer(replay):
        seen.append(replay.batch_size)
        return replay()

    with runner.observe(observer), runner.without_stats():
        runner.replay(make_batch(2))
    assert (seen, runner.stats.replays) == ([2], 0)


def test_an_observer_that_fails_leaves_the_runner_usable(
    runner, make_batch, expect, assert_same, assert_in_step
):
    def fail(replay):
        raise ValueError("observed")

    with runner.observe(fail), pytest.raises(ValueError, match="observed"):
        runner.replay(make_batch(2))
    assert_same(runner.replay(make_batch(2, seed=3)), expect(make_batch(2, seed=3)))
    assert_in_step(runner)


@pytest.mark.parametrize("close", [False, True])
def test_only_a_captured_runner_can_be_observed(make_runner, close):
    runner = make_runner()
    if close:
        runner.close()
    with pytest.raises(ReplayError, match="observe needs a captured runner"):
        runner.observe(lambda replay: replay())


@pytest.mark.parametrize("value", [None, 3])
def test_an_observer_is_a_function(runner, value):
    with pytest.raises(ConfigError, match=rf"observer must be a function, got {value}"):
        runner.observe(value)


def test_a_wrapped_forward_runs_eagerly_and_padded_but_not_in_graphs(runner, make_batch):
    calls = []

    def wrapper(forward):
        return lambda inputs: (calls.append(inputs.batch_size), forward(inputs))[1]

    with runner.step.wrapped(wrapper):
        runner.replay(make_batch(3))
        assert calls == []
        runner.run_padded(make_batch(3))
        runner.fall_back(make_batch(3))
    runner.fall_back(make_batch(3))
    assert calls == [4, 3]


def test_a_replay_is_made_once_and_inside_its_observer(
    runner, make_batch, expect, assert_same, assert_in_step
):
    kept = []

    def observer(replay):
        kept.append(replay)
        return replay()

    with runner.observe(observer):
        runner.replay(make_batch(2))
    for _ in range(2):
        with pytest.raises(ReplayError, match="this replay is no longer valid"):
            kept[0]()
    assert_same(runner.replay(make_batch(3)), expect(make_batch(3)))
    assert_in_step(runner)


def test_a_replay_inside_an_observer_takes_the_entry_of_the_launch(
    runner, make_batch, expect, assert_same, assert_in_step
):
    def observer(replay):
        inner = make_batch(3, seed=1)
        if replay.batch_size == 2:
            assert_same(runner.replay(inner), expect(inner))
        return replay()

    with (
        pytest.raises(ReplayError, match="replayed another batch"),
        runner.observe(observer),
    ):
        runner.replay(make_batch(2))
    assert_same(runner.replay(make_batch(4)), expect(make_batch(4)))
    assert_in_step(runner)


def test_a_graph_that_was_replayed_without_its_runner_is_reported_once(
    runner, make_batch, expect, assert_same, assert_in_step
):
    runner.graphs[4].replay()
    with pytest.raises(ReplayError, match=r"replay \d+ read the mailbox entry of another replay"):
        runner.replay(make_batch(3))
    for seed in range(6):
        assert_same(runner.replay(make_batch(3, seed=seed)), expect(make_batch(3, seed=seed)))
    assert_in_step(runner)
