"""DRAFT_EXTEND: batches whose counts and rows contradict each other, and those without a graph."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from graphkit import ForwardOutput, InputError, OutputError, SizeError
from graphkit.buffers import AcceptedCounts
from graphkit.runners import DraftExtendRunner, Reason

GOOD = [2, 3]


def counts_of(*tokens):
    return AcceptedCounts.from_tokens(np.array(tokens, np.int32)).fields()


BAD = {
    "wrong sum": counts_of(2, 2),
    "above S + 1": counts_of(5, 1) | {"extend_seq_lens": np.array([5, 1])},
    "drafts as tokens": {"num_accepted_drafts": np.array([2, 3], np.int32)},
    "no token": {
        "num_accepted_drafts": np.array([-1, 4], np.int32),
        "num_accepted_tokens": np.array([0, 5], np.int32),
    },
}


def as_torch(fields):
    return {name: torch.from_numpy(rows) for name, rows in fields.items()}


@pytest.fixture
def case(extend_case):
    return extend_case()


@pytest.fixture
def runner(case, make_model):
    return case.runner(DraftExtendRunner, make_model())


@pytest.mark.parametrize("kind", [dict, as_torch])
@pytest.mark.parametrize("bad", BAD)
def test_replay_refuses_by_name_and_loses_nothing(runner, case, assert_in_step, bad, kind):
    rows = [5, 1] if bad == "above S + 1" else GOOD
    good = case.batch(rows if bad != "above S + 1" else [4, 2], seed=1)
    batch = case.batch(rows, seed=1, **kind(BAD[bad]))
    expected = runner.replay(good, clone=True)
    for way in (runner.replay, runner.run):
        with pytest.raises(InputError) as caught:
            way(batch)
        assert caught.value.field in ("num_accepted_tokens", "num_accepted_drafts")
        assert caught.value.field in str(caught.value)
    decision = runner.can_replay(batch)
    assert (decision.ok, decision.kind) == (False, Reason.BAD_FIELD)
    assert "num_accepted" in decision.reason
    assert torch.equal(runner.replay(good).topk_index, expected.topk_index)
    assert runner.stats.fallbacks == {}
    assert_in_step(runner)


@pytest.mark.parametrize("bad", ["wrong sum", "drafts as tokens", "no token"])
def test_a_staged_replay_refuses_and_may_be_corrected(runner, case, assert_in_step, stage, bad):
    good = case.batch(GOOD, seed=1)
    expected = runner.replay(good, clone=True)
    staged = stage(runner, good, **BAD[bad])
    with pytest.raises(InputError) as caught:
        staged.replay()
    assert caught.value.field == "num_accepted_tokens"
    for name, rows in AcceptedCounts.from_tokens(np.array(GOOD, np.int32)).fields().items():
        getattr(staged, name)[:] = rows
    assert torch.equal(staged.replay().topk_index, expected.topk_index)
    assert_in_step(runner)


def test_a_staged_batch_that_nobody_wrote_has_one_row_each(runner, case):
    """Pads: two requests of one row, in a slot staged for eight."""
    staged = runner.stage(2)
    staged.hidden_states = torch.zeros(8, 4)
    with pytest.raises(InputError, match="sums to 2, but the batch has 8 rows"):
        staged.replay()
    staged = runner.stage(2, 2)
    staged.hidden_states = torch.zeros(2, 4)
    assert staged.replay().topk_index.shape == (2, 2)


@pytest.mark.parametrize(
    ("requests", "tokens", "error"),
    [
        (2, 9, InputError),
        (2, 1, InputError),
        (2, 0, InputError),
        (5, 5, SizeError),
        (0, 0, SizeError),
    ],
)
def test_tokens_that_cannot_be_staged(runner, requests, tokens, error):
    with pytest.raises(error, match=f"{requests} requests"):
        runner.stage(requests, tokens)


def test_tokens_are_not_for_modes_of_one_width(make_runner):
    runner = make_runner()
    runner.capture()
    assert runner.stage(2, 8).input_ids.shape == (8,)
    with pytest.raises(InputError, match="7 tokens in 2 requests") as caught:
        runner.stage(2, 7)
    assert caught.value.field == "num_tokens"


@pytest.mark.parametrize("tokens", [9, 1])
def test_tokens_beyond_the_bucket(runner, case, tokens):
    """More than S + 1 per request, or fewer than one."""
    batch = case.batch([1, 1])
    for name in ("input_ids", "positions", "out_cache_loc"):
        setattr(batch, name, np.zeros(tokens, int))
    assert runner.can_replay(batch).kind is Reason.WRONG_WIDTH
    with pytest.raises(InputError, match=f"{tokens} tokens in 2 requests.*1 to 4"):
        runner.replay(batch)


def test_a_prompt_falls_back(runner, case):
    """Longer than any captured row count, but sound."""
    batch = case.batch([9], seed=3)
    assert (
        runner.can_replay(batch).reason
        == "the batch has 9 tokens in 1 requests; captured are 1 to 4 tokens per request"
    )
    output = runner.run(batch)
    assert output.next_token_logits.tolist() == [case.rows(batch)[0][-1][0]]
    assert runner.stats.fallbacks == {"wrong width": 1}


@pytest.mark.parametrize("bad", ["wrong sum", "drafts as tokens", "no token"])
def test_there_is_no_eager_way_for_a_contradiction(case, make_model, bad):
    """It would select a row of another request without an error."""
    planned = case.runner(DraftExtendRunner, make_model(), capture=False)
    for way in (planned.run, planned.fall_back):
        with pytest.raises(InputError):
            way(case.batch(GOOD, **BAD[bad]))


@pytest.mark.parametrize(
    "odd",
    [
        [2, 3, 4],
        [9, 9],
        np.array(["a", "b"]),
        np.array([2.5, 3]),
        np.array([[2, 3]]),
        torch.tensor([2, 3]).to_sparse(),
        torch.tensor([2, 3], dtype=torch.bfloat16),
        torch.tensor([2.0, 3.0], requires_grad=True),
        None,
    ],
    ids=["long list", "list", "texts", "fraction", "2-d", "sparse", "bf16", "gradient", "nothing"],
)
@pytest.mark.parametrize("name", ["num_accepted_drafts", "num_accepted_tokens"])
def test_odd_counts_are_taken_or_refused_in_our_words(runner, case, assert_in_step, odd, name):
    batch = case.batch(GOOD, **{name: odd})
    if runner.can_replay(batch):
        runner.replay(batch)
        assert torch.as_tensor(odd).tolist() == getattr(case.batch(GOOD), name).tolist()
    else:
        with pytest.raises(InputError, match="num_accepted"):
            runner.replay(batch)
    runner.replay(case.batch(GOOD))
    assert_in_step(runner)


@pytest.mark.parametrize("names", [["positions"], ["input_ids", "positions", "out_cache_loc"]])
@pytest.mark.parametrize("way", ["replay", "run", "fall_back"])
def test_rows_may_be_bound(case, make_model, names, way):
    """Another graph writes them in place; the batch has the counts, which tell how many."""
    whole = case.batch([2, 3, 1, 4], seed=9)
    storage = {name: torch.zeros(16, dtype=torch.int64) for name in names}
    runner = case.runner(DraftExtendRunner, make_model(), bound_fields=storage)
    for name, rows in storage.items():
        rows[: whole.num_tokens] = torch.from_numpy(getattr(whole, name))
    given = case.batch(whole.num_accepted_tokens, seed=9, **dict.fromkeys(names))
    assert runner.can_replay(given)
    output = getattr(runner, way)(given)
    assert output.next_token_logits.tolist() == [rows[-1][0] for rows in case.rows(whole)]


@pytest.mark.parametrize("rows", [3, 7])
def test_a_forward_returns_rows_of_tokens_or_requests(case, make_model, rows):
    model = make_model()

    def forward(inputs):
        out = model(inputs)
        return ForwardOutput(next_token_logits=out.next_token_logits[:rows].clone())

    runner = case.runner(DraftExtendRunner, forward, capture=False)
    with pytest.raises(
        OutputError, match=f"{rows} rows of next_token_logits for 8 tokens or 4 req"
    ):
        runner.fall_back(case.batch([2, 2, 2, 2]))
