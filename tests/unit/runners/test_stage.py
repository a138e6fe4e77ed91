"""A slot that the scheduler writes itself: what it shows, refuses, and when it is over."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from graphkit import InputError, ReplayError, SizeError, TargetVerifyInputs
from graphkit.buffers import Axis, declare

NAMES = ("req_pool_indices", "seq_lens", "input_ids", "positions", "out_cache_loc")
OVER = "this staged batch is no longer valid"


@pytest.fixture
def stage():
    """``stage(runner, batch)``: a staged batch with these rows."""

    def stage(runner, batch):
        staged = runner.stage(batch.batch_size)
        for name in NAMES:
            getattr(staged, name)[:] = getattr(batch, name)
        return staged

    return stage


def test_views_are_the_live_rows_in_numpy(runner):
    staged = runner.stage(3)
    for name in NAMES:
        rows = getattr(staged, name)
        assert type(rows) is np.ndarray
        assert rows.shape == ((3,) if name in NAMES[:2] else (12,))
        assert rows.dtype == (np.int32 if name == "seq_lens" else np.int64)
        assert np.shares_memory(rows, runner.buffers.mailbox.ring.numpy())


@pytest.mark.parametrize("requests", [1, 2, 3, 4])
def test_a_staged_replay_is_a_replay(runner, make_batch, expect, assert_same, stage, requests):
    for seed in range(6):
        batch = make_batch(requests, seed=seed)
        assert_same(stage(runner, batch).replay(), expect(batch))
        assert_same(runner.replay(batch), expect(batch))
    assert runner.stats.replays == 12


def test_a_clone_outlives_the_next_replay(runner, make_batch, expect, assert_same, stage):
    first, second = make_batch(2, seed=1), make_batch(2, seed=2)
    copy = stage(runner, first).replay(clone=True)
    runner.replay(second)
    assert_same(copy, expect(first))


def test_rows_that_nobody_writes_are_pads(runner, make_batch, expect, assert_same):
    for seed in range(5):  # every slot has held something else
        runner.replay(make_batch(4, seed=seed))
    staged = runner.stage(2)
    assert staged.seq_lens.tolist() == [1, 1]
    assert staged.input_ids.tolist() == [0] * 8
    staged.seq_lens[0] = 9
    staged.input_ids[:4] = [3, 1, 4, 1]
    pads = {name: np.zeros(8, int) for name in ("positions", "out_cache_loc")}
    ids, lens = np.array([3, 1, 4, 1, 0, 0, 0, 0]), np.array([9, 1])
    pads["req_pool_indices"] = np.zeros(2, int)
    same = make_batch(2, seq_lens=lens, input_ids=ids, **pads)
    assert_same(staged.replay(), expect(same))


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_assigning_copies_and_casts(runner, make_batch, expect, assert_same, kind):
    batch = make_batch(2, kind=kind)
    staged = runner.stage(2)
    for name in NAMES:
        setattr(staged, name, getattr(batch, name))
    staged.seq_lens = np.array([8, 9])
    expected = expect(make_batch(2, kind=kind, seq_lens=np.array([8, 9])))
    with pytest.raises(InputError, match="'positions' has shape"):
        staged.positions = np.zeros(3)
    assert_same(staged.replay(), expected)


def test_arrays_of_the_captured_dtype_are_copied_without_a_cast(
    runner, make_batch, expect, assert_same, monkeypatch
):
    monkeypatch.setattr("graphkit.buffers.writers.validate_field", None)
    batch, staged = make_batch(2), runner.stage(2)
    views = {name: getattr(staged, name) for name in NAMES}
    for name in NAMES:
        setattr(staged, name, getattr(batch, name))
    assert all(getattr(staged, name) is view for name, view in views.items())
    staged.positions += 1
    batch.positions = batch.positions + 1
    assert_same(staged.replay(), expect(batch))


def test_a_field_by_address_must_be_assigned(make_runner, make_batch, expect, assert_same, stage):
    runner = make_runner(optional_fields=["input_embeds"])
    runner.capture()
    rows = torch.arange(64.0).view(8, 8)
    batch = make_batch(2, input_embeds=rows)
    staged = stage(runner, batch)
    with pytest.raises(InputError, match="'input_embeds' has no numpy view") as unread:
        _ = staged.input_embeds
    with pytest.raises(InputError, match="'input_embeds' was not assigned") as missing:
        staged.replay()
    assert unread.value.field == missing.value.field == "input_embeds"
    staged.input_embeds = rows
    assert_same(staged.replay(), expect(batch))
    assert_same(runner.replay(batch), expect(batch))


def test_segments_and_half_precision(make_runner, make_batch, model, stage):
    seen = {}
    own = dataclasses.make_dataclass(
        "Own",
        [
            ("planes", object, declare(Axis.TOKEN, torch.int64, "three of them", lead=3, pad=2)),
            ("scores", object, declare(Axis.REQUEST, torch.bfloat16, "of each request", pad=1)),
        ],
        bases=(TargetVerifyInputs,),
        kw_only=True,
        eq=False,
    )
    runner = make_runner(lambda inputs: seen.update(vars(inputs)) or model(inputs), inputs_type=own)
    runner.capture()
    staged = stage(runner, make_batch(3))
    assert staged.planes.shape == (3, 12)
    staged.planes[1] = 7
    with pytest.raises(InputError, match="'scores' has no numpy view"):
        _ = staged.scores
    staged.scores = torch.tensor([0.5, 1.5, 2.5])
    staged.replay()
    view = runner.buffers.view(4)
    assert view.planes.tolist() == [[2] * 16, [7] * 12 + [2] * 4, [2] * 16]
    assert view.scores.tolist() == [0.5, 1.5, 2.5, 1.0]
    stage(runner, make_batch(3)).replay()
    assert view.scores.tolist() == [1.0] * 4, "pads, until it is assigned"


def test_unknown_fields_are_named_with_the_known(runner):
    staged = runner.stage(2)
    for use in (lambda: staged.seqlens, lambda: setattr(staged, "seqlens", np.zeros(2))):
        with pytest.raises(InputError, match=r"'seqlens'.*seq_lens") as caught:
            use()
        assert caught.value.field == "seqlens"
    with pytest.raises(InputError, match="'mrope_positions'"):
        _ = staged.mrope_positions


@pytest.mark.parametrize("requests", [5, 0, -1])
def test_sizes_that_cannot_be_staged(runner, requests):
    with pytest.raises(SizeError, match=str(requests)) as caught:
        runner.stage(requests)
    assert caught.value.largest == 4


def replay_and_fail(runner, batch):
    with pytest.raises(InputError):
        runner.replay(dataclasses.replace(batch, out_cache_loc=np.zeros(3)))


@pytest.mark.parametrize(
    "overtake",
    [
        lambda runner, batch: runner.replay(batch),
        lambda runner, batch: runner.stage(2),
        replay_and_fail,
        lambda runner, batch: runner.close(),
    ],
    ids=["replay", "stage", "failed replay", "close"],
)
def test_an_overtaken_batch_is_refused(runner, make_batch, stage, overtake):
    staged = stage(runner, make_batch(2))
    overtake(runner, make_batch(2, seed=7))
    with pytest.raises(ReplayError, match=OVER):
        staged.replay()


@pytest.mark.parametrize("overtake", ["stage", "replay", "close"])
def test_an_overtaken_batch_writes_nothing_any_more(
    make_runner, make_batch, expect, assert_same, stage, overtake
):
    """Its slot may be another batch's by now, of the very same rows and addresses."""
    runner = make_runner(optional_fields=["input_embeds"])
    runner.capture()
    old, batch = runner.stage(2), make_batch(2, input_embeds=torch.arange(64.0).view(8, 8))
    new = stage(runner, batch)
    new.input_embeds = batch.input_embeds
    if overtake == "replay":
        new.replay()
    elif overtake == "close":
        runner.close()
    for name, value in (("seq_lens", np.array([40, 41])), ("input_embeds", torch.ones(8, 8))):
        with pytest.raises(ReplayError, match=OVER):
            setattr(old, name, value)
    if overtake == "stage":
        assert_same(new.replay(), expect(batch))


def test_a_batch_is_replayed_once(runner, make_batch, expect, assert_same, assert_in_step, stage):
    staged = stage(runner, make_batch(2))
    staged.replay()
    with pytest.raises(ReplayError, match=OVER):
        staged.replay()
    assert_same(runner.replay(make_batch(2)), expect(make_batch(2)))
    assert_in_step(runner)


def test_asking_does_not_overtake(runner, make_batch, expect, assert_same, stage):
    batch = make_batch(2)
    staged = stage(runner, batch)
    runner.can_replay(make_batch(3))
    runner.fall_back(make_batch(3))
    runner.run(make_batch(9))
    runner.replay(make_batch(0))
    assert_same(staged.replay(), expect(batch))
