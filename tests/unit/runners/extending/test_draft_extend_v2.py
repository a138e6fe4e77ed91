"""DRAFT_EXTEND_V2: all W rows of every request, and no top-k."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from graphkit import InputError, OutputError
from graphkit.buffers import AcceptedCounts
from graphkit.runners import DraftExtendOutput, DraftExtendV2Runner, Reason

SETTINGS = [("EAGLE", 3, 1, 4), ("EAGLE", 3, 2, 6), ("EAGLE", 2, 3, 5), ("EAGLE", 4, 4, 1)]


def check(case, output, batch):
    """A row for each token, and nothing else."""
    assert type(output) is DraftExtendOutput
    assert (output.topk_p, output.topk_index) == (None, None)
    rows = [row for request in case.rows(batch) for row in request]
    assert output.next_token_logits.tolist() == [logits for logits, _ in rows]
    if batch.hidden_states is None:
        assert output.hidden_states is None
    else:
        assert output.hidden_states.tolist() == [hidden for _, hidden in rows]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_every_way_has_every_row(
    extend_case, make_model, poison, assert_in_step, settings, assert_same
):
    """Also in buffers full of garbage, at every size, accepted or not."""
    case, model = extend_case(*settings), make_model()
    runner, width = case.runner(DraftExtendV2Runner, model), settings[3]
    assert runner.tokens_per_request == width
    rng = np.random.default_rng(0)
    for seed, requests in enumerate([4, 1, 3, 2, 4, 1]):
        counts = rng.integers(1, min(width, settings[1] + 1) + 1, requests)
        batch = case.batch(counts, width=width, seed=seed)
        poison(runner)
        calls = model.calls
        output = runner.replay(batch, clone=True)
        assert_same(runner.replay(batch, padded_batch_size=4), output)
        assert model.calls == calls, "Python ran again"
        check(case, output, batch)
        assert_same(runner.run_padded(batch), output)
        assert_same(runner.fall_back(batch), output)
    assert_in_step(runner)


def test_pads(extend_case, make_model, poison):
    case = extend_case()
    runner = case.runner(DraftExtendV2Runner, make_model())
    poison(runner)
    batch = case.batch([6, 1, 3], width=6)
    runner.replay(batch)
    view = runner.buffers.view(4)
    facts = ("req_pool_indices", "seq_lens", "extend_seq_lens")
    assert [getattr(view, name)[3].item() for name in facts] == [0, 1, 6]
    assert view.num_accepted_drafts.tolist() == [5, 0, 2, 0]
    assert view.num_accepted_tokens.tolist() == [6, 1, 3, 1]
    for name in ("input_ids", "positions", "out_cache_loc", "hidden_states"):
        rows = getattr(view, name)
        assert torch.equal(rows[:18], torch.as_tensor(getattr(batch, name))), name
        assert rows[18:].eq(0).all(), name
    assert runner.stats.padded_rows == 6


def test_the_worker_selects_by_last_rows(extend_case, make_model):
    case = extend_case()
    runner = case.runner(DraftExtendV2Runner, make_model())
    counts = [3, 1, 6]
    batch = case.batch(counts, width=6, kind=torch.from_numpy)
    select_index = batch.last_rows()
    assert select_index.tolist() == [i * 6 + count - 1 for i, count in enumerate(counts)]
    output = runner.replay(batch)
    rows = case.rows(batch)
    assert output.next_token_logits[select_index].tolist() == [
        rows[i][count - 1][0] for i, count in enumerate(counts)
    ]


def test_counts_of_a_tree_may_reach_the_width(extend_case, make_model):
    case = extend_case()
    runner = case.runner(DraftExtendV2Runner, make_model())
    check(case, runner.replay(case.batch([6], width=6)), case.batch([6], width=6))
    for counts in ([7], [1, 7]):
        batch = case.batch(counts, width=6)
        assert runner.can_replay(batch).kind is Reason.BAD_FIELD
        with pytest.raises(InputError, match="to 7, but a request has 1 to 6 rows") as caught:
            runner.fall_back(batch)
        assert caught.value.field == "num_accepted_tokens"


def test_a_staged_batch_is_a_batch(extend_case, make_model, assert_in_step, stage):
    case = extend_case()
    runner = case.runner(DraftExtendV2Runner, make_model())
    for seed in range(6):
        batch = case.batch([1, 6, 2], width=6, seed=seed)
        check(case, stage(runner, batch).replay(), batch)
    assert_in_step(runner)


@pytest.mark.parametrize(
    "names", [["num_accepted_drafts", "num_accepted_tokens"], ["num_accepted_tokens"]]
)
@pytest.mark.parametrize("way", ["replay", "run", "fall_back", "stage"])
def test_counts_may_be_bound(extend_case, make_model, stage, names, way):
    """As in the overlapped step, where another graph counts what was accepted."""
    case = extend_case()
    storage = {name: torch.zeros(4, dtype=torch.int32) for name in names}
    runner = case.runner(DraftExtendV2Runner, make_model(), bound_fields=storage)
    whole = case.batch([2, 6, 1, 4], width=6)
    for name, rows in storage.items():
        rows.copy_(torch.from_numpy(getattr(whole, name)))
    given = case.batch([2, 6, 1, 4], width=6, **dict.fromkeys(names))
    if way == "stage":
        check(case, stage(runner, given).replay(), whole)
    else:
        check(case, getattr(runner, way)(given), whole)


def test_a_pair_of_one_dtype_may_come_from_anywhere(extend_case, make_model):
    case = extend_case()
    runner = case.runner(DraftExtendV2Runner, make_model())
    for rows in (np.array([1, 3]), torch.tensor([1, 3]), np.array([1, 3], np.uint8)):
        batch = case.batch([1, 3], width=6, **AcceptedCounts.from_tokens(rows).fields())
        check(case, runner.replay(batch), batch)


@pytest.mark.parametrize("life", ["planned", "captured"])
def test_idle_batches(extend_case, make_model, life):
    case, model = extend_case(), make_model()
    runner = case.runner(DraftExtendV2Runner, model, capture=life == "captured")
    calls = model.calls
    output = runner.run(case.batch([], width=6))
    shapes = {name: tuple(rows.shape) for name, rows in output.tensors().items()}
    assert shapes == {"next_token_logits": (0, 31), "hidden_states": (0, 4)}
    assert type(output) is DraftExtendOutput
    assert (model.calls, runner.stats.replays, runner.stats.fallbacks) == (calls, 0, {})


def test_a_narrower_batch_falls_back(extend_case, make_model):
    case = extend_case()
    runner, batch = case.runner(DraftExtendV2Runner, make_model()), case.batch([1, 3], width=4)
    assert runner.can_replay(batch).kind is Reason.WRONG_WIDTH
    check(case, runner.run(batch), batch)
    assert runner.stats.fallbacks == {"wrong width": 1}


@pytest.mark.parametrize("tokens", [11, 13])
def test_rows_that_no_width_explains_are_refused(extend_case, make_model, tokens):
    case = extend_case()
    runner, batch = case.runner(DraftExtendV2Runner, make_model()), case.batch([1, 1], width=6)
    for name in ("input_ids", "positions", "out_cache_loc"):
        setattr(batch, name, np.zeros(tokens, int))
    batch.hidden_states = torch.zeros(tokens, 4)
    assert not runner.can_replay(batch)
    for way in (runner.replay, runner.run, runner.fall_back):
        with pytest.raises(InputError, match="input_ids"):
            way(batch)


def test_standalone_has_no_hidden_states(extend_case, make_model):
    case = extend_case("STANDALONE", 3, 2, 6)
    runner, batch = case.runner(DraftExtendV2Runner, make_model()), case.batch([2, 4], width=6)
    for way in (runner.replay, runner.fall_back):
        check(case, way(batch), batch)
    fed = case.batch([2, 4], width=6, hidden_states=torch.zeros(12, 4))
    assert runner.can_replay(fed).kind is Reason.FIELD_NOT_CAPTURED


def test_rows_of_requests_are_not_enough(extend_case, make_model):
    """Unlike v1, every row is wanted: which of them count is the worker's to say."""
    case = extend_case()
    runner = case.runner(DraftExtendV2Runner, make_model(0, "request", "request"), capture=False)
    with pytest.raises(OutputError, match="2 rows of next_token_logits for 12 tokens"):
        runner.fall_back(case.batch([1, 1], width=6))
