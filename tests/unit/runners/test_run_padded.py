"""``run_padded``: the captured functions without the graph."""

from __future__ import annotations

import pytest
import torch

from graphkit import InputError, ReplayError, SizeError


def test_it_gives_the_answer_of_a_replay(runner, make_batch, model, expect, assert_same):
    calls = model.calls
    for turn, requests in enumerate([3, 1, 4, 2, 3, 3]):
        batch = make_batch(requests, seed=turn, kind="mixed")
        output = runner.run_padded(batch)
        assert output.next_token_logits.shape == (requests * 4, 32)
        assert_same(output, expect(batch))
    assert model.calls == calls + 6
    assert runner.stats.replays == 0


def test_it_needs_no_capture(make_runner, make_batch, expect, assert_same):
    batch = make_batch(3)
    assert_same(make_runner().run_padded(batch), expect(batch))


def test_the_forward_sees_the_padded_view(make_runner, make_batch, model):
    seen = []
    runner = make_runner(lambda inputs: seen.append(inputs) or model(inputs))
    batch = make_batch(3)
    runner.run_padded(batch)
    assert (seen[-1].batch_size, seen[-1].num_tokens) == (4, 16)
    assert seen[-1].seq_lens.tolist() == [*batch.seq_lens, 1]
    assert seen[-1].input_ids.tolist() == [*batch.input_ids, 0, 0, 0, 0]
    assert seen[-1].input_ids.data_ptr() == runner.buffers.view(4).input_ids.data_ptr()
    runner.run_padded(make_batch(1), padded_batch_size=2)
    assert seen[-1].batch_size == 2


def test_it_reads_host_values_that_the_graph_froze(runner, make_batch, model, expect, assert_same):
    batch = make_batch(2)
    old = expect(batch)
    model.scale = 3
    new = expect(batch)
    assert_same(runner.replay(batch), old)
    assert_same(runner.run_padded(batch), new)
    assert_same(runner.replay(batch), old)


def test_graph_memory_does_not_change(runner, make_batch, expect, assert_same):
    first, second = make_batch(2, seed=1), make_batch(2, seed=2)
    graph = runner.replay(first)
    padded = runner.run_padded(second)
    assert_same(graph, expect(first))
    assert_same(padded, expect(second))


def test_padded_runs_and_replays_share_the_mailbox(
    runner, make_batch, expect, assert_same, assert_in_step
):
    for turn in range(12):
        batch = make_batch(1 + turn % 4, seed=turn)
        run = runner.run_padded if turn % 3 else runner.run
        assert_same(run(batch), expect(batch))
        assert_in_step(runner)
    assert runner.stats.replays == 4


def test_no_gradients_are_recorded(make_runner, make_batch, model):
    model.head.requires_grad_()
    runner = make_runner()
    for run in (runner.run_padded, runner.fall_back):
        assert not run(make_batch(2)).next_token_logits.requires_grad


def test_idle_batches_run_nothing(runner, make_batch, model):
    calls = model.calls
    assert runner.run_padded(make_batch(0)).next_token_logits.shape == (0, 32)
    assert model.calls == calls


def test_it_goes_on_from_the_state_that_a_replay_leaves(make_runner, make_batch, model):
    steps = torch.zeros(1)
    runner = make_runner(
        lambda inputs: (steps.add_(1), model(inputs))[1], mutable_state={"steps": steps}
    )
    runner.capture()
    for run in (runner.run_padded, runner.replay, runner.run_padded, runner.replay):
        run(make_batch(3))
    assert steps.item() == 4


@pytest.mark.parametrize(("requests", "size"), [(5, None), (3, 2), (1, 8), (2, -1)])
def test_sizes_that_do_not_fit(runner, make_batch, requests, size):
    with pytest.raises(SizeError, match=f"{requests} requests"):
        runner.run_padded(make_batch(requests), padded_batch_size=size)


def test_wrong_batches_are_refused(runner, make_batch, expect, assert_same, assert_in_step):
    with pytest.raises(InputError, match="6 tokens in 2 requests"):
        runner.run_padded(make_batch(2, width=3))
    with pytest.raises(InputError, match="'input_embeds' was not captured"):
        runner.run_padded(make_batch(2, input_embeds=torch.zeros(8, 8)))
    with pytest.raises(InputError, match="'positions'"):
        runner.run_padded(make_batch(2, positions=None))
    assert_same(runner.run_padded(make_batch(2)), expect(make_batch(2)))
    assert_in_step(runner)


def test_a_closed_runner_refuses(runner, make_batch):
    runner.close()
    with pytest.raises(ReplayError, match="closed"):
        runner.run_padded(make_batch(2))
