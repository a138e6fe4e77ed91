"""An idle batch with a padded size replays a graph of pads, so that collectives match."""

from __future__ import annotations

import pytest
import torch

from graphkit import ReplayError, SizeError


@pytest.fixture
def counting(make_runner, model):
    """A captured runner whose graph counts its runs, and the counter."""
    steps = torch.zeros(1)
    runner = make_runner(
        lambda inputs: (steps.add_(1), model(inputs))[1], mutable_state={"steps": steps}
    )
    runner.capture()
    return runner, steps


@pytest.mark.parametrize("verb", ["replay", "run"])
def test_it_launches_a_graph_of_pads(
    counting, make_batch, expect, assert_same, assert_in_step, verb
):
    runner, steps = counting
    runner.replay(make_batch(4, seed=1))
    output = getattr(runner, verb)(make_batch(0), padded_batch_size=4)
    assert steps.item() == 2
    assert output.next_token_logits.shape == (0, 32)
    view = runner.buffers.view(4)
    for layout in runner.buffers.layouts:
        assert (getattr(view, layout.name) == layout.pad).all(), layout.name
    assert runner.stats.replays_by_size == {4: 2}
    assert runner.stats.padded_rows == 16
    assert_same(runner.replay(make_batch(3)), expect(make_batch(3)))
    assert_in_step(runner)


def test_without_a_size_it_launches_nothing(counting, make_batch):
    runner, steps = counting
    for run in (runner.replay, runner.run):
        assert run(make_batch(0)).next_token_logits.shape == (0, 32)
    assert steps.item() == 0
    assert runner.stats.replays == 0


def test_a_live_batch_runs_at_the_size_that_run_is_given(counting, make_batch, expect, assert_same):
    runner, _ = counting
    assert_same(runner.run(make_batch(1), padded_batch_size=4), expect(make_batch(1)))
    assert runner.stats.replays_by_size == {4: 1}


def test_observers_see_it(counting, make_batch):
    runner, _ = counting
    seen = []

    def observer(launch):
        seen.append((launch.batch_size, launch.padded_batch_size, launch.num_tokens))
        return launch()

    with runner.observe(observer):
        runner.replay(make_batch(0), padded_batch_size=2)
    assert seen == [(0, 2, 0)]


def test_sizes_and_states_that_cannot_run(make_runner, runner, make_batch):
    with pytest.raises(SizeError, match="batch size 3"):
        runner.replay(make_batch(0), padded_batch_size=3)
    with pytest.raises(ReplayError, match="needs a captured runner"):
        make_runner().replay(make_batch(0), padded_batch_size=4)
