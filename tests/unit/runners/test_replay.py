"""Replays against the model itself: every kind of batch, idle ones too, at every size."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch

from graphkit import (
    Decision,
    DecodeRunner,
    InputError,
    ReplayError,
    SizeError,
    TargetVerifyInputs,
    TargetVerifyRunner,
)
from graphkit.buffers import ENTRIES
from graphkit.runners import Reason

OPTIONAL = {
    "custom_mask": np.tril(np.ones((3, 4, 4), bool)),
    "input_embeds": np.arange(96, dtype=np.float32).reshape(12, 8),
    "mrope_positions": np.arange(36).reshape(3, 12),
}


@pytest.mark.parametrize("kind", ["numpy", "torch", "mixed"])
def test_every_live_size(runner, make_batch, model, expect, assert_same, assert_in_step, kind):
    calls = model.calls
    for turn, requests in enumerate([4, 1, 3, 2, 2, 4, 1, 1, 3, 4] * 2):
        batch = make_batch(requests, seed=turn, kind=kind)
        output = runner.replay(batch)
        assert output.next_token_logits.shape == (requests * 4, 32)
        assert_same(output, expect(batch))
    assert model.calls == calls, "Python ran again"
    assert_in_step(runner)


def test_what_a_graph_sees_behind_the_live_rows(runner, make_batch):
    runner.replay(make_batch(4))
    runner.replay(make_batch(3))
    view = runner.buffers.view(4)
    tails = {name: getattr(view, name)[3:].tolist() for name in ("req_pool_indices", "seq_lens")}
    assert tails == {"req_pool_indices": [0], "seq_lens": [1]}
    for name in ("input_ids", "positions", "out_cache_loc"):
        assert getattr(view, name)[12:].tolist() == [0] * 4, name


@pytest.mark.parametrize(
    "over",
    [
        {"seq_lens": np.array([7, 8])},
        {"seq_lens": torch.tensor([7, 8])},
        {"seq_lens": np.array([7, 8], np.uint64)},
        {"seq_lens": [7, 8]},
        {"input_ids": np.arange(8, dtype=np.int32)},
        {"positions": torch.arange(16)[::2]},
        {"out_cache_loc": np.arange(8)[::-1]},
        {"req_pool_indices": np.array([3, 4], dtype=np.uint8)},
    ],
)
def test_host_values_are_cast(runner, make_batch, expect, assert_same, over):
    batch = make_batch(2, **over)
    assert_same(runner.replay(batch), expect(batch))


@pytest.mark.parametrize("names", [[name] for name in OPTIONAL] + [list(OPTIONAL)])
def test_optional_fields(make_runner, make_batch, expect, assert_same, names):
    runner = make_runner(optional_fields=names)
    runner.capture()
    fields = {name: OPTIONAL[name] for name in names}
    for turn in range(6):
        batch = make_batch(3, seed=turn, **fields)
        assert_same(runner.replay(batch), expect(batch))
        assert_same(runner.fall_back(batch), expect(batch))
    with pytest.raises(InputError, match=f"'{names[0]}' is missing"):
        runner.replay(make_batch(3, **{**fields, names[0]: None}))


def test_the_next_replay_overwrites_what_was_not_cloned(runner, make_batch, expect, assert_same):
    first, second = make_batch(2, seed=1), make_batch(2, seed=2)
    alias, copy = runner.replay(first), runner.replay(first, clone=True)
    run_copy = runner.run(first, clone=True)
    assert alias.next_token_logits.data_ptr() != copy.next_token_logits.data_ptr()
    again = runner.replay(second)
    assert again.next_token_logits.data_ptr() == alias.next_token_logits.data_ptr()
    assert_same(alias, expect(second))
    assert_same(copy, expect(first))
    assert_same(run_copy, expect(first))


@pytest.mark.parametrize("way", ["replay", "run_padded"])
def test_rows_by_address_live_until_the_device_has_read_them(
    make_runner, make_batch, expect, assert_same, way
):
    """The caller may drop them at once. A later replay frees them, once they have been read."""
    runner = make_runner(optional_fields=["input_embeds"])
    runner.capture()
    refs = []
    for seed in range(9):
        rows = np.full((8, 8), seed, np.float32)
        refs.append(weakref.ref(rows))
        batch = make_batch(2, seed=seed, input_embeds=torch.from_numpy(rows))
        assert_same(getattr(runner, way)(batch), expect(batch))
        del rows, batch
        alive = [n for n, ref in enumerate(refs) if ref() is not None]
        assert alive == list(range(max(seed - ENTRIES, 0), seed + 1))


@pytest.mark.parametrize("padded", [2, 4])
def test_a_size_may_be_asked_for(runner, make_batch, expect, assert_same, padded):
    batch = make_batch(2)
    assert_same(runner.replay(batch, padded_batch_size=padded), expect(batch))
    assert runner.stats.replays_by_size == {padded: 1}


@pytest.mark.parametrize(
    ("requests", "padded"), [(2, 3), (2, 1), (2, 0), (2, -1), (5, 4), (5, None)]
)
def test_a_size_that_does_not_fit(
    runner, make_batch, expect, assert_same, assert_in_step, requests, padded
):
    with pytest.raises(SizeError, match=rf"{requests} requests .*(\[1, 2, 4\]|largest is 4)") as no:
        runner.replay(make_batch(requests), padded_batch_size=padded)
    assert (no.value.batch_size, no.value.largest) == (requests, 4)
    assert_same(runner.replay(make_batch(2)), expect(make_batch(2)))
    assert_in_step(runner)


@pytest.mark.parametrize("cls", [DecodeRunner, TargetVerifyRunner])
def test_an_idle_batch_may_bring_nothing_else(make_runner, cls):
    runner, idle = make_runner(cls=cls), TargetVerifyInputs(req_pool_indices=np.zeros(0, int))
    assert runner.run(idle).next_token_logits.shape == (0, 32)
    runner.capture()
    assert runner.can_replay(idle) == Decision(True, "", 0)
    for way in (runner.replay, runner.run, runner.fall_back):
        assert way(idle).next_token_logits.shape == (0, 32)
    assert runner.stats.fallbacks == {}


def test_rows_without_a_request_are_refused(make_runner, make_batch):
    """A scheduler that lost its requests must not see its tokens vanish, too."""
    runner, batch = make_runner(), make_batch(0, input_ids=np.zeros(4, int))
    with pytest.raises(InputError, match="4 tokens in 0 requests"):
        runner.fall_back(batch)
    runner.capture()
    assert runner.can_replay(batch).kind is Reason.WRONG_WIDTH
    for way in (runner.replay, runner.run, runner.fall_back):
        with pytest.raises(InputError, match="4 tokens in 0 requests") as caught:
            way(batch)
        assert caught.value.field == "num_tokens"


def test_idle_batches(make_runner, make_batch, model):
    runner, idle = make_runner(), make_batch(0)
    with pytest.raises(ReplayError, match="planned"):
        runner.replay(idle)
    for output in (runner.run(idle), runner.fall_back(idle)):
        assert output.next_token_logits.shape == (0, 32)
        assert output.hidden_states.shape == (0, 8)
    runner.capture()
    calls, sequence = model.calls, runner.buffers.mailbox.sequence
    decision = runner.can_replay(idle)
    assert (decision.ok, decision.padded_batch_size) == (True, 0)
    for output in (runner.replay(idle), runner.run(idle, clone=True), runner.fall_back(idle)):
        assert output.next_token_logits.shape == (0, 32)
        assert output.hidden_states.shape == (0, 8)
    assert (model.calls, runner.buffers.mailbox.sequence) == (calls, sequence)
    assert runner.stats.replays == 0
    runner.close()
    with pytest.raises(ReplayError, match="closed"):
        runner.replay(idle)
    with pytest.raises(ReplayError, match="closed"):
        runner.run(idle)


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
