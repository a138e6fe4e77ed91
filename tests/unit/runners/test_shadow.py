"""Shadow mode: the identical padded path without the graph."""

from __future__ import annotations

import pytest
import torch

from graphkit import ConfigError


def test_the_same_answer_from_python(runner, make_batch, model, expect, assert_same):
    runner.shadow = "padded"
    assert runner.shadow == "padded"
    calls = model.calls
    for turn, requests in enumerate([3, 1, 4, 2, 3, 3]):
        batch = make_batch(requests, seed=turn, kind="mixed")
        output = runner.replay(batch)
        assert output.next_token_logits.shape == (requests * 4, 32)
        assert_same(output, expect(batch))
    assert model.calls == calls + 6


def test_the_forward_sees_the_padded_view(make_runner, make_batch, model):
    seen = []
    runner = make_runner(lambda inputs: seen.append(inputs) or model(inputs))
    runner.capture()
    runner.shadow = "padded"
    batch = make_batch(3)
    runner.replay(batch)
    assert (seen[-1].batch_size, seen[-1].num_tokens) == (4, 16)
    assert seen[-1].seq_lens.tolist() == [*batch.seq_lens, 1]
    assert seen[-1].input_ids.tolist() == [*batch.input_ids, 0, 0, 0, 0]
    assert seen[-1].input_ids.data_ptr() == runner.buffers.view(4).input_ids.data_ptr()
    runner.replay(make_batch(1), padded_batch_size=2)
    assert seen[-1].batch_size == 2


def test_it_tells_a_baked_value_from_a_live_one(runner, make_batch, model, expect, assert_same):
    batch = make_batch(2)
    old = expect(batch)
    model.scale = 3
    new = expect(batch)
    assert_same(runner.replay(batch), old)
    runner.shadow = "padded"
    assert_same(runner.replay(batch), new)
    runner.shadow = None
    assert_same(runner.replay(batch), old)


def test_graph_memory_stays_as_it_was(runner, make_batch, expect, assert_same):
    first, second = make_batch(2, seed=1), make_batch(2, seed=2)
    graph = runner.replay(first)
    runner.shadow = "padded"
    shadow = runner.replay(second)
    assert_same(graph, expect(first))
    assert_same(shadow, expect(second))


def test_shadow_and_graph_share_the_mailbox(
    runner, make_batch, expect, assert_same, assert_in_step
):
    for turn in range(12):
        runner.shadow = "padded" if turn % 3 else None
        batch = make_batch(1 + turn % 4, seed=turn)
        if turn % 2:
            staged = runner.stage(batch.batch_size)
            for name, rows in vars(batch).items():
                if rows is not None:
                    setattr(staged, name, rows)
            assert_same(staged.replay(), expect(batch))
        else:
            assert_same(runner.run(batch), expect(batch))
        assert_in_step(runner)
    assert runner.stats.replays == 12
    assert runner.stats.replays_by_size == {1: 3, 2: 3, 4: 6}


def test_no_gradients_are_recorded(make_runner, make_batch, model):
    model.head.requires_grad_()
    runner = make_runner()
    runner.capture()
    runner.shadow = "padded"
    for way in (runner.replay, runner.fall_back):
        assert not way(make_batch(2)).next_token_logits.requires_grad


@pytest.mark.parametrize("wrong", ["eager", True, ""])
def test_other_ways_are_refused(runner, wrong):
    with pytest.raises(ConfigError, match=f"'padded' or None, got {wrong!r}") as caught:
        runner.shadow = wrong
    assert caught.value.field == "shadow"
    assert runner.shadow is None


def test_idle_batches_run_nothing(runner, make_batch, model):
    runner.shadow = "padded"
    calls = model.calls
    assert runner.replay(make_batch(0)).next_token_logits.shape == (0, 32)
    assert model.calls == calls


def test_state_goes_on_from_shadow_to_graph(make_runner, make_batch, model):
    steps = torch.zeros(1)
    runner = make_runner(
        lambda inputs: (steps.add_(1), model(inputs))[1], mutable_state={"steps": steps}
    )
    runner.capture()
    for way in ("padded", None, "padded", None):
        runner.shadow = way
        runner.replay(make_batch(3))
    assert steps.item() == 4
