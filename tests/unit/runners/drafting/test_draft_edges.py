"""DRAFT: settings and batches that are refused, idle batches, and fields that are not there."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from graphkit import (
    CaptureError,
    ConfigError,
    CustomSpecAlgorithm,
    ForwardOutput,
    InputError,
    OutputError,
    SpecConfig,
)
from graphkit.ops import build_tree
from graphkit.runners import DraftOutput, DraftRunner, Reason

TREE = (3, 2, 6)


@pytest.mark.parametrize(
    ("settings", "field"),
    [((0, 1, 1), "num_steps"), ((1, 2, 4), "num_draft_tokens"), ((2, 1, 4), "num_draft_tokens")],
)
def test_settings_that_draft_nothing_or_too_little(draft_case, settings, field):
    """Algorithms of one's own fill the tree at will, but not by this runner."""
    spec = SpecConfig(CustomSpecAlgorithm("OWN"), *settings)
    case = draft_case(*TREE)
    with pytest.raises(ConfigError) as caught:
        DraftRunner(case.model, spec=spec, sizes=case.sizes, device="cpu")
    assert caught.value.field == field


def test_an_algorithm_of_ones_own_may_verify_fewer_than_it_drafts(draft_case):
    case = draft_case(*TREE)
    case.spec = case.model.spec = SpecConfig(CustomSpecAlgorithm("OWN"), 3, 1, 2)
    batch = case.batch(3)
    case.check(case.runner().replay(batch), batch)


@pytest.mark.parametrize("shape", [(3, 2, 6), (1, 3, 4), (4, 1, 5)], ids=str)
@pytest.mark.parametrize("life", ["planned", "captured"])
def test_an_idle_batch_makes_a_tree_of_no_requests(draft_case, shape, life):
    case = draft_case(*shape)
    runner, (steps, topk, width) = case.runner(capture=life == "captured"), shape
    calls = case.model.calls
    output = runner.run(case.batch(0))
    assert output.parent_list.shape == (0, topk * (steps - 1) + 1)
    assert output.top_scores_index.shape == output.draft_tokens.shape == (0, width - 1)
    none = torch.empty(0, dtype=torch.int64)
    mask, *_ = build_tree(
        none, output.parent_list, output.top_scores_index, output.draft_tokens, none.int(), *shape
    )
    assert mask.shape == (0, width, width)
    assert (case.model.calls, runner.stats.fallbacks) == (calls, {})


@pytest.mark.parametrize("requests", [1, 3])
def test_rows_of_another_width_are_refused(draft_case, requests):
    """K branches are what the model drafts: there is no eager way with fewer."""
    case = draft_case(*TREE)
    batch = case.batch(requests)
    batch.positions, batch.out_cache_loc = batch.positions[::2], batch.out_cache_loc[: requests * 3]
    runner = case.runner()
    assert not runner.can_replay(batch)
    for way in (runner.replay, runner.run, runner.fall_back):
        with pytest.raises(InputError, match="'positions'"):
            way(batch)


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("topk_p", np.zeros((3, 3))),
        ("topk_index", np.zeros((2, 2))),
        ("topk_index", np.full((3, 2), 0.5)),
        ("out_cache_loc", np.zeros(6)),
        ("out_cache_loc", np.zeros((3, 2, 3))),
        ("hidden_states", np.zeros((6, 8))),
        ("hidden_states", None),
        ("topk_p", None),
    ],
)
def test_a_refusal_names_the_field_and_loses_nothing(draft_case, assert_in_step, name, rows):
    case = draft_case(*TREE)
    runner, good = case.runner(), case.batch(3)
    bad = case.batch(3, **{name: rows})
    assert runner.can_replay(bad).kind is Reason.BAD_FIELD
    for way in (runner.replay, runner.run, runner.fall_back):
        with pytest.raises(InputError, match=f"'{name}'") as caught:
            way(bad)
        assert caught.value.field == name
        case.check(runner.replay(good), good)
    assert_in_step(runner)


def test_a_batch_above_the_largest_size_falls_back(draft_case):
    case = draft_case(*TREE)
    runner, batch = case.runner(), case.batch(7)
    case.check(runner.run(batch), batch)
    assert runner.stats.fallbacks == {"batch too large": 1}


@pytest.mark.parametrize("topk", [1, 2])
def test_standalone_has_no_hidden_states(draft_case, topk):
    case = draft_case(3, topk, 4, "STANDALONE")
    runner, batch = case.runner(), case.batch(3)
    assert runner.buffers.view(4).hidden_states is None
    assert batch.hidden_states is None
    for way in (runner.replay, runner.fall_back):
        case.check(way(batch), batch)
    fed = case.batch(3, hidden_states=torch.zeros(3, 8))
    assert runner.can_replay(fed).kind is Reason.FIELD_NOT_CAPTURED
    with pytest.raises(InputError, match="'hidden_states' was not captured") as caught:
        runner.replay(fed)
    assert caught.value.field == "hidden_states"


def test_the_advice_about_a_field_without_use_can_be_followed(draft_case):
    """No ``optional`` makes room for what the algorithm has no use for."""
    case = draft_case(*TREE, "STANDALONE")
    with pytest.raises(InputError) as caught:
        case.runner().replay(case.batch(3, hidden_states=torch.zeros(3, 8)))
    if "optional_fields=['hidden_states']" in str(caught.value):
        case.runner(optional_fields=["hidden_states"])


@pytest.mark.parametrize("names", [["positions"], ["positions", "out_cache_loc"]])
@pytest.mark.parametrize("way", ["replay", "run", "fall_back"])
def test_rows_per_token_may_be_bound(draft_case, names, way):
    case = draft_case(*TREE)
    whole = case.batch(4, seed=9)
    storage = {name: torch.from_numpy(getattr(whole, name)).clone() for name in names}
    runner = case.runner(bound_fields=storage)
    for name, rows in storage.items():
        rows.copy_(torch.from_numpy(getattr(whole, name)))
    given = case.batch(4, seed=9, **dict.fromkeys(names))
    assert runner.can_replay(given)
    case.check(getattr(runner, way)(given), whole)
    assert runner.stats.fallbacks == {}


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (lambda out: out.next_token_logits, r"returned a Tensor.*Return graphkit\.ForwardOutput"),
        (
            lambda out: DraftOutput(parent_list=None, top_scores_index=None, draft_tokens=None),
            "returned a DraftOutput",
        ),
        (
            lambda out: ForwardOutput(next_token_logits=out.next_token_logits[1:]),
            "rows of next_token_logits for (6|8) tokens",
        ),
        (
            lambda out: ForwardOutput(
                next_token_logits=out.next_token_logits, hidden_states=out.hidden_states[::2]
            ),
            "rows of hidden_states for (6|8) tokens",
        ),
    ],
    ids=["tensor", "another output", "too few", "a row per request"],
)
def test_a_step_must_return_a_row_per_branch(draft_case, wrong, text):
    case = draft_case(*TREE)
    runner = case.runner(lambda inputs: wrong(case.model(inputs)), capture=False)
    with pytest.raises(OutputError, match=text):
        runner.fall_back(case.batch(3))
    with pytest.raises(CaptureError, match=f"OutputError: .*{text}"):
        runner.capture()
    assert runner.status == "planned"
