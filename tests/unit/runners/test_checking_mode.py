"""The checking mode: values out of range, duplicate slots and numbers that are not finite."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from graphkit import DecodeRunner, InputError

BAD = {
    "row below 0": ("req_pool_indices", [-1, 2], "contains -1. Expected a row of the request pool"),
    "length below 0": ("seq_lens", [-5, 2], "contains -5. Expected a length within"),
    "length beyond the context": ("seq_lens", [3, 500], "contains 500.*0 to 64"),
    "position beyond the context": ("positions", [64] + 7 * [1], "contains 64.*0 to 63"),
    "id beyond the vocabulary": ("input_ids", 7 * [1] + [32], "contains 32.*a token id, 0 to 31"),
    "id below 0": ("input_ids", 7 * [1] + [-2], "contains -2"),
    "slot below 0": ("out_cache_loc", [-1, *range(1, 8)], "contains -1.*a slot of the KV pool"),
    "duplicate slots": ("out_cache_loc", [5, *range(1, 8)], "contains 5.*each slot at most once"),
}


@pytest.fixture
def distinct(make_batch):
    """``distinct(requests, **fields)``: a batch whose slots do not repeat."""

    def make(requests, **fields):
        return make_batch(requests, **{"out_cache_loc": 1 + np.arange(requests * 4), **fields})

    return make


@pytest.fixture
def checking(make_runner):
    runner = make_runner(check=True)
    runner.capture()
    return runner


def field_of(name, rows):
    return {name: np.array(rows, np.int32 if name == "seq_lens" else np.int64)}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("verb", ["replay", "run", "run_padded", "fall_back", "staged"])
def test_values_on_the_host_are_refused_at_once(
    checking, distinct, expect, assert_same, assert_in_step, stage, bad, verb
):
    name, rows, text = BAD[bad]
    batch = distinct(2, **field_of(name, rows))

    def staged(batch):
        return stage(checking, batch).replay()

    run = staged if verb == "staged" else getattr(checking, verb)
    with pytest.raises(InputError, match=text) as caught:
        run(batch)
    assert caught.value.field == name
    assert_same(checking.replay(distinct(3)), expect(distinct(3)))
    assert_in_step(checking)


def test_values_of_the_device_are_reported_by_the_next_call(
    make_runner, distinct, expect, assert_same
):
    """Bound storage is read by the graph alone, as a device tensor of an engine is."""
    positions = torch.zeros(16, dtype=torch.int64)
    runner = make_runner(check=True, bound_fields={"positions": positions})
    runner.capture()
    batch = distinct(2, positions=None)
    positions[:8] = torch.arange(8)
    runner.replay(batch)
    positions[3] = 99
    runner.replay(batch)  # its own result is not known yet
    positions[3] = 3
    for _ in range(2):
        with pytest.raises(InputError, match="of an earlier replay contains 99") as caught:
            runner.replay(batch)
        assert caught.value.field == "positions"
        output = runner.replay(batch)  # reported once
        assert_same(output, expect(distinct(2, positions=np.arange(8))))
        positions[3] = 99
        runner.replay(batch)
        positions[3] = 3


def test_a_violation_is_kept_until_it_is_reported(make_runner, distinct):
    positions = torch.zeros(16, dtype=torch.int64)
    runner = make_runner(check=True, bound_fields={"positions": positions})
    runner.capture()
    batch = distinct(2, positions=None)
    replayer = runner._replayer
    replayer._value_checks, checks = None, replayer._value_checks  # three replays in flight
    for value in (-7, -9, 0):
        positions[0] = value
        runner.replay(batch)
    with pytest.raises(InputError, match="contains -7"):
        checks.report()
    checks.report()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_hidden_states_must_be_finite(make_runner, distinct, value):
    runner = make_runner(check=True, optional_fields=["input_embeds"])
    runner.capture()
    rows = torch.zeros(8, 8)
    rows[5, 2] = value
    for run in (runner.replay, runner.fall_back):
        with pytest.raises(InputError, match=r"'input_embeds'.*Expected finite numbers"):
            run(distinct(2, input_embeds=rows))


def test_pads_pass_every_check(checking, distinct, expect, assert_same):
    for requests in (1, 2, 3, 4, 1):
        batch = distinct(requests, seed=requests)
        assert_same(checking.replay(batch), expect(batch))
    checking.replay(distinct(0), padded_batch_size=4)
    checking.replay(distinct(1))


def test_it_is_off_by_default_and_on_by_the_environment(make_runner, distinct, monkeypatch):
    bad = distinct(2, **field_of("positions", 8 * [4000]))
    runner = make_runner()
    runner.capture()
    runner.replay(bad)
    monkeypatch.setenv("GRAPHKIT_CHECK", "1")
    with pytest.raises(InputError, match="'positions'"):
        make_runner().run_padded(bad)
    make_runner(check=False).run_padded(bad)


def test_pools_give_the_bounds_of_rows_and_slots(make_runner, distinct):
    from graphkit.engine.attention import SdpaAttention
    from graphkit.engine.kv import MHATokenToKVPool, ReqToTokenPool

    attention = SdpaAttention(
        ReqToTokenPool(4, 64, "cpu"), MHATokenToKVPool(32, 1, torch.float32, 1, 4, 1, "cpu")
    )
    runner = make_runner(check=True, attention=attention)
    runner.capture()
    for name, rows, text in (
        ("req_pool_indices", [1, 5], "contains 5.*0 to 4"),
        ("out_cache_loc", [33, *range(1, 8)], "contains 33.*0 to 32"),
    ):
        with pytest.raises(InputError, match=text):
            runner.replay(
                distinct(2, **{"req_pool_indices": np.array([1, 2]), **field_of(name, rows)})
            )


def test_one_row_does_not_repeat_itself(make_runner, make_batch):
    runner = make_runner(cls=DecodeRunner, check=True, batch_sizes=[1])
    runner.capture()
    runner.replay(make_batch(1, width=1))
    runner.replay(make_batch(1, width=1))
    runner.fall_back(make_batch(1, width=1))


def embedding_runner(make_runner):
    runner = make_runner(check=True, optional_fields=["input_embeds"])
    runner.capture()
    return runner


@pytest.mark.parametrize("make", [np.asarray, torch.from_numpy, np.ndarray.tolist])
@pytest.mark.parametrize("verb", ["replay", "run_padded"])
def test_floats_on_the_host_are_checked_before_the_replay(make_runner, distinct, make, verb):
    runner = embedding_runner(make_runner)
    rows = np.zeros((8, 8), np.float32)
    rows[5, 2] = np.nan
    replays = runner.stats.replays
    with pytest.raises(InputError, match="'input_embeds' of this batch contains nan") as caught:
        getattr(runner, verb)(distinct(2, input_embeds=make(rows)))
    assert caught.value.field == "input_embeds"
    assert runner.stats.replays == replays


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize(
    ("make", "fact"),
    [
        (torch.Tensor.to_sparse, "sparse"),
        (lambda rows: rows.to(torch.complex64).conj(), "torch.complex64"),
        (lambda rows: torch.quantize_per_tensor(rows, 0.1, 0, torch.qint8), "torch.qint8"),
    ],
)
def test_floats_that_numpy_lacks_are_refused_by_name(make_runner, distinct, make, fact):
    runner = embedding_runner(make_runner)
    with pytest.raises(InputError, match=f"field 'input_embeds' is {fact}"):
        runner.replay(distinct(2, input_embeds=make(torch.ones(8, 8))))
