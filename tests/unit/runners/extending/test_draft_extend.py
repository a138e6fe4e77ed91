"""DRAFT_EXTEND: packed rows of accepted tokens, one row of output per request."""

from __future__ import annotations

import gc
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from graphkit import OutputError, ReplayError
from graphkit.buffers import ENTRIES, FieldWriter
from graphkit.runners import DraftExtendOutput, DraftExtendRunner

COUNTS = [[4, 4, 4, 4], [1], [2, 3, 1, 4], [1, 1, 1, 1], [4], [3, 1], [1, 4, 2], [2, 2]]
"""Live requests and live tokens vary, each without the other too; four rows at most."""
FORMS = [("token", "token"), ("request", "request"), ("token", "request"), ("request", "token")]


@pytest.fixture(scope="session")
def check(by_hand):
    """``check(case, output, batch)``: the last row of each request, and its top-k."""

    def check(case, output, batch):
        assert isinstance(output, DraftExtendOutput)
        last = [rows[-1] for rows in case.rows(batch)]
        assert output.next_token_logits.tolist() == [logits for logits, _ in last]
        if last[0][1] is None:
            assert output.hidden_states is None
        else:
            assert output.hidden_states.tolist() == [hidden for _, hidden in last]
        for request, (logits, _) in enumerate(last):
            p, tokens = by_hand.top(logits, case.spec.topk)
            assert output.topk_index[request].tolist() == tokens
            assert output.topk_p[request].tolist() == pytest.approx(p, rel=1e-6)
        assert output.topk_index.shape == output.topk_p.shape == (len(last), case.spec.topk)

    return check


@pytest.mark.parametrize("form", FORMS, ids="-".join)
@pytest.mark.parametrize("topk", [1, 2])
def test_every_way_selects_the_last_rows(
    extend_case, make_model, poison, check, assert_in_step, form, topk, assert_same
):
    """Also in buffers full of garbage, and at every size that holds the batch."""
    case, model = extend_case("EAGLE", 3, topk, 4), make_model(0, *form)
    runner = case.runner(DraftExtendRunner, model)
    for seed, counts in enumerate(COUNTS):
        batch = case.batch(counts, seed=seed)
        poison(runner)
        output = runner.replay(batch, clone=True)
        check(case, output, batch)
        assert_same(runner.replay(batch, padded_batch_size=4), output)
        assert_same(runner.run_padded(batch), output)
        assert_same(runner.fall_back(batch), output)
    assert_in_step(runner)


def test_what_is_kept_does_not_grow_with_every_number_of_tokens(extend_case, make_model):
    """Of 256 requests there are 98,000 pairs of requests and tokens."""
    case = extend_case()
    case.sizes = replace(case.sizes, max_batch_size=16)
    runner = case.runner(DraftExtendRunner, make_model(), batch_sizes=[16])

    def writers():
        return sum(type(each) is FieldWriter for each in gc.get_objects())

    before = writers()
    for requests in range(1, 17):
        for tokens in range(requests, 4 * requests + 1, 2):
            runner.stage(requests, tokens)
    assert writers() - before < 64 * ENTRIES * len(runner.buffers.layouts)


@settings(deadline=None, max_examples=25, derandomize=True)
@given(st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=4), min_size=1, max_size=6))
def test_any_run_of_batches(extend_case, make_model, check, run):
    case, model = extend_case(), make_model()
    runner = case.runner(DraftExtendRunner, model, batch_sizes=[2, 4])
    calls = model.calls
    for seed, counts in enumerate(run):
        batch = case.batch(counts, seed=seed, kind=[np.asarray, torch.from_numpy][seed % 2])
        check(case, runner.replay(batch), batch)
    assert runner.stats.replays == len(run)
    assert model.calls == calls, "Python ran again"


def test_rows_of_nobody_are_pads(extend_case, make_model, poison):
    """A batch that fills the captured size has a tail where it has fewer tokens."""
    case = extend_case()
    runner = case.runner(DraftExtendRunner, make_model())
    for counts in ([4, 4, 4, 4], [1, 2, 1, 3], [1, 2, 3]):
        poison(runner)
        batch, live = case.batch(counts), sum(counts)
        runner.replay(batch)
        view = runner.buffers.view(4)
        for name in ("input_ids", "positions", "out_cache_loc", "hidden_states"):
            rows = getattr(view, name)
            assert torch.equal(rows[:live], torch.as_tensor(getattr(batch, name))), name
            assert rows[live:].eq(0).all(), name
        tails = {
            name: getattr(view, name)[len(counts) :].tolist()
            for name in (
                "seq_lens",
                "extend_seq_lens",
                "num_accepted_drafts",
                "num_accepted_tokens",
            )
        }
        pads = 4 - len(counts)
        assert tails == {
            "seq_lens": [1] * pads,
            "extend_seq_lens": [1] * pads,
            "num_accepted_drafts": [0] * pads,
            "num_accepted_tokens": [1] * pads,
        }


def test_padded_rows_are_counted_in_tokens(extend_case, make_model):
    case = extend_case()
    runner = case.runner(DraftExtendRunner, make_model())
    for counts, padded in [([4], 0), ([1], 3), ([1, 2], 5), ([4, 4, 4], 4), ([1, 1, 1, 1], 12)]:
        before = runner.stats.padded_rows
        runner.replay(case.batch(counts))
        assert runner.stats.padded_rows - before == padded
    assert runner.stats.replays_by_size == {1: 2, 2: 1, 4: 2}
    runner.replay(case.batch([2]), padded_batch_size=4)
    assert runner.stats.padded_rows == 24 + 14
    assert runner.stats.replays_by_size[4] == 3
    runner.close()
    assert runner.stats.padded_rows == 24 + 14


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_a_staged_batch_is_a_batch(extend_case, make_model, check, assert_in_step, stage, counts):
    case = extend_case()
    runner = case.runner(DraftExtendRunner, make_model())
    for seed in range(3):
        batch = case.batch(counts, seed=seed)
        staged = stage(runner, batch)
        assert staged.input_ids.shape == (sum(counts),)
        check(case, staged.replay(), batch)
    assert_in_step(runner)


def test_a_staged_batch_has_all_rows_unless_said(extend_case, make_model, check, stage):
    case = extend_case()
    runner, batch = case.runner(DraftExtendRunner, make_model()), case.batch([4, 4, 4])
    assert runner.stage(3).input_ids.shape == (12,)
    check(case, stage(runner, batch).replay(), batch)


def test_an_overtaken_batch_says_so(extend_case, make_model, stage):
    """Its slot holds the other batch's counts by now; that is not what is wrong with it."""
    case = extend_case()
    runner, batch = case.runner(DraftExtendRunner, make_model()), case.batch([2, 3])
    staged = stage(runner, batch)
    runner.replay(case.batch([1, 1]))
    with pytest.raises(ReplayError, match="this staged batch is no longer valid"):
        staged.replay()


@pytest.mark.parametrize("life", ["planned", "captured"])
def test_idle_batches_have_every_field(extend_case, make_model, life):
    case, model = extend_case(), make_model()
    runner = case.runner(DraftExtendRunner, model, capture=life == "captured")
    calls = model.calls
    output = runner.run(case.batch([]))
    assert {name: tuple(rows.shape) for name, rows in output.tensors().items()} == {
        "next_token_logits": (0, 31),
        "hidden_states": (0, 4),
        "topk_p": (0, 2),
        "topk_index": (0, 2),
    }
    assert (model.calls, runner.stats.replays, runner.stats.fallbacks) == (calls, 0, {})


def test_a_target_that_feeds_three_layers(extend_case, make_model, check):
    case = extend_case("EAGLE3", 3, 1, 4, feed=3)
    runner, batch = case.runner(DraftExtendRunner, make_model()), case.batch([2, 4, 1])
    assert runner.buffers.view(2).hidden_states.shape == (8, 12)
    check(case, runner.replay(batch), batch)


def test_standalone_has_no_hidden_states(extend_case, make_model, check):
    case = extend_case("STANDALONE", 3, 2, 4)
    runner, batch = case.runner(DraftExtendRunner, make_model()), case.batch([2, 4, 1])
    assert runner.buffers.view(2).hidden_states is None
    for way in (runner.replay, runner.fall_back):
        check(case, way(batch), batch)


@pytest.mark.parametrize("forms", [("nothing", "token"), ("token", "nothing")])
def test_what_a_forward_leaves_out(extend_case, make_model, forms):
    case, batch = extend_case(), extend_case().batch([2, 4, 1])
    runner = case.runner(DraftExtendRunner, make_model(0, *forms), capture=False)
    if forms[0] == "nothing":
        with pytest.raises(OutputError, match="Return graphkit"):
            runner.fall_back(batch)
        return
    runner.capture()
    assert runner.replay(batch).hidden_states is None
    assert runner.replay(batch).topk_index.shape == (3, 2)
