"""Batches that cannot be replayed: the refusal names the field, and nothing is lost."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

import graphkit as gk
from engine_target import TableForward, engine_target
from graphkit import InputError, ReplayError, SizeError, TargetVerifyInputs
from graphkit.buffers import Axis, declare
from graphkit.runners.capture_checks import host_objects

NAMES = ("req_pool_indices", "seq_lens", "input_ids", "positions", "out_cache_loc")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "wrong",
    [None, np.ones((1, 2), int), np.int64(3), "ab", "meta", "too long", "fraction"],
    ids=str,
)
def test_a_refusal_names_the_field_and_loses_nothing(
    runner, make_batch, expect, assert_same, assert_in_step, name, wrong
):
    rows = getattr(make_batch(2), name)
    value = {
        "meta": torch.empty(rows.shape, dtype=torch.from_numpy(rows).dtype, device="meta"),
        "too long": np.concatenate([rows, rows[:1]]),
        "fraction": rows + 0.5,
    }.get(str(wrong), wrong)
    batch = make_batch(2, **{name: value})
    if name == "req_pool_indices" and str(wrong) == "too long":
        name = "seq_lens"  # three requests, says the first field; the second has two
    for way in (runner.replay, runner.run, runner.fall_back):
        with pytest.raises((InputError, SizeError), match=f"'{name}'") as caught:
            way(batch)
        assert caught.value.field == name
    decision = runner.can_replay(batch)
    assert not decision.ok
    for seed in range(5):
        assert_same(runner.replay(make_batch(2, seed=seed)), expect(make_batch(2, seed=seed)))
    assert_in_step(runner)


@pytest.fixture
def own_inputs():
    """Inputs of a user who declares one field more."""
    field = declare(Axis.REQUEST, torch.float32, "of each request", pad=1)
    return dataclasses.make_dataclass(
        "Own", [("heat", object, field)], bases=(TargetVerifyInputs,), kw_only=True, eq=False
    )


def test_a_batch_without_a_declared_field_is_refused_by_name(make_runner, make_batch, own_inputs):
    runner = make_runner(inputs_type=own_inputs)
    runner.capture()
    for way in (runner.replay, runner.run, runner.fall_back):
        with pytest.raises(InputError, match="'heat'"):
            way(make_batch(2))
    assert not runner.can_replay(make_batch(2))
    assert runner.replay(make_batch(2, cls=own_inputs, heat=np.ones(2)))


def test_a_field_that_was_not_captured_is_refused(runner, make_batch):
    with pytest.raises(
        InputError, match=r"'mrope_positions'.*optional_fields=\['mrope_positions'\]"
    ):
        runner.replay(make_batch(3, mrope_positions=np.zeros((3, 12), int)))


@pytest.mark.parametrize(("way", "error"), [("replay", ReplayError), ("run_padded", IndexError)])
def test_a_run_that_fails_leaves_the_runner_usable(
    runner, make_batch, expect, assert_same, assert_in_step, way, error
):
    """A token beyond the vocabulary: the refresh has run when the forward fails."""
    runner.replay(make_batch(2))
    run = getattr(runner, way)
    for seed in range(6):
        bad = make_batch(2, seed=seed, input_ids=np.full(8, 99))
        with pytest.raises(error):
            run(bad)
        good = make_batch(3, seed=seed)
        assert_same(run(good), expect(good))
        assert_in_step(runner)
    assert runner.stats.replays == (7 if way == "replay" else 1)


def test_a_staged_replay_that_fails_leaves_the_runner_usable(
    runner, make_batch, expect, assert_same, assert_in_step
):
    """Its entry was consumed, so a second replay would not be read."""
    for seed in range(6):
        staged = runner.stage(2)
        staged.input_ids[:] = 99
        with pytest.raises(ReplayError, match="raised IndexError"):
            staged.replay()
        staged.input_ids[:] = 1
        with pytest.raises(ReplayError, match="this staged batch is no longer valid"):
            staged.replay()
        batch = make_batch(3, seed=seed)
        assert_same(runner.replay(batch), expect(batch))
        assert_in_step(runner)


def test_weights_on_another_device_are_refused_before_the_capture(make_runner):
    embedding = torch.nn.Embedding(32, 32, device="meta")

    def forward(inputs):
        return gk.ForwardOutput(next_token_logits=embedding(inputs.input_ids))

    runner = make_runner(forward)
    text = "the weights of the forward are on meta, the runner on cpu. Move the model there, or"
    with pytest.raises(gk.ConfigError, match=text):
        runner.capture()
    with pytest.raises(gk.ConfigError, match="are on meta, the runner on cuda:0"):
        host_objects(forward).check_weights(torch.device("cuda", 0))
    embedding = torch.nn.Embedding(32, 32)
    runner.capture()


@pytest.mark.parametrize("generation", ["v1", "v3"])
def test_an_engine_refuses_weights_on_another_device_before_it_warms_up(generation):
    class Misplaced(TableForward):
        def __init__(self, pool, device):
            super().__init__(pool, device)
            self.weight = torch.nn.Linear(2, 2, device="meta")

        def __call__(self, inputs):
            raise AssertionError("the forward ran")

    target = engine_target(forward=Misplaced, generation=generation)
    with (
        target.engine(batch_sizes=[1], device="cpu", backend=None) as engine,
        pytest.raises(gk.ConfigError, match="the weights of the forward are on meta"),
    ):
        engine.capture()


def test_a_function_whose_weights_are_on_another_device_is_refused_before_it_runs():
    model = torch.nn.Linear(4, 4, device="meta").eval()
    with pytest.raises(gk.ConfigError, match="the weights of the forward are on meta, the runner"):
        gk.capture(model, torch.zeros(1, 4), batch_sizes=[1], device="cpu")


def test_weights_on_several_devices_are_left_to_the_capture(make_runner):
    unused, embedding = torch.nn.Linear(2, 2, device="meta"), torch.nn.Embedding(32, 32)

    def forward(inputs):
        return gk.ForwardOutput(next_token_logits=embedding(inputs.input_ids), hidden_states=None)

    forward.unused = unused
    make_runner(forward).capture()


@pytest.mark.parametrize("rows", [6, 8])
def test_the_field_that_counts_the_requests_is_named_if_all_others_have_another_number(
    make_runner, make_batch, sizes, rows
):
    runner = make_runner(sizes=dataclasses.replace(sizes, max_batch_size=8), batch_sizes=[8])
    runner.capture()
    batch = make_batch(7, req_pool_indices=np.ones(rows, int))
    with pytest.raises(InputError) as caught:
        runner.replay(batch)
    assert str(caught.value) == (
        f"field 'seq_lens' has shape (7,). This batch needs ({rows},). 'req_pool_indices' has "
        f"{rows} rows, and all other fields are of 7 requests."
    )
    with pytest.raises(InputError) as caught:
        runner.replay(make_batch(7, seq_lens=np.ones(6, int)))
    assert str(caught.value) == "field 'seq_lens' has shape (6,). This batch needs (7,)."
