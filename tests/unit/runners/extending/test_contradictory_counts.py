"""Counts that contradict each other are refused by every way into a graph, in every mode.

Tokens are drafts plus the bonus token. A graph that reads other counts selects another row, and
returns it without an error.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from graphkit import (
    DraftExtendRunner,
    DraftExtendV2Runner,
    InputError,
    MultiLayerDraftExtendInputs,
    MultiLayerEagleRunner,
)
from graphkit.runners.dispatch import Reason

INT32 = np.int32
BAD = {
    "tokens without bonus": {"num_accepted_tokens": np.array([1, 2], INT32)},
    "more tokens than rows": {
        "num_accepted_drafts": np.array([8, 1], INT32),
        "num_accepted_tokens": np.array([9, 2], INT32),
    },
    "no token": {
        "num_accepted_drafts": np.array([-1, 1], INT32),
        "num_accepted_tokens": np.array([0, 2], INT32),
    },
    "lengths above the width": {"extend_seq_lens": np.array([9, 6], INT32)},
    "negative lengths": {"extend_seq_lens": np.array([-1, 6], INT32)},
}
SELECT = {
    "another request's row": {"select_index": np.array([7, 7])},
    "beyond the batch": {"select_index": np.array([1, 99])},
}


@pytest.fixture(params=["v2", "layers"])
def runner_and_batch(request, extend_case, make_model):
    """``(runner, batch)``; ``batch(**fields)`` has two requests that accepted 2 and 3 tokens."""
    case = extend_case()
    if request.param == "v2":
        runner = case.runner(DraftExtendV2Runner, make_model())
        return runner, lambda **fields: case.batch([2, 3], width=6, seed=1, **fields)
    layers = [make_model(layer=i) for i in range(3)]
    runner = case.runner(MultiLayerEagleRunner, layers)
    select = {"cls": MultiLayerDraftExtendInputs, "select_index": np.array([1, 8])}
    return runner, lambda **fields: case.batch([2, 3], width=6, seed=1, **{**select, **fields})


@pytest.fixture
def refuses(assert_same, assert_in_step, stage):
    """``refuses(runner, good, bad)``: every way refuses one batch, and takes the other after it."""

    def check(runner, good, bad):
        def staged(batch):
            return stage(runner, batch).replay()

        wanted = runner.replay(good, clone=True)
        for run in (runner.replay, runner.run, runner.fall_back, staged):
            with pytest.raises(InputError) as caught:
                run(bad)
            assert caught.value.field in str(caught.value)
        assert runner.can_replay(bad).kind is Reason.BAD_FIELD
        for run in (runner.replay, staged):
            assert_same(run(good), wanted)
        assert runner.stats.fallbacks == {}
        assert_in_step(runner)

    return check


@pytest.mark.parametrize("kind", [lambda rows: rows, torch.from_numpy], ids=["numpy", "torch"])
@pytest.mark.parametrize("bad", BAD)
def test_counts(runner_and_batch, refuses, bad, kind):
    runner, batch = runner_and_batch
    fields = {name: kind(rows) for name, rows in BAD[bad].items()}
    refuses(runner, batch(), batch(**fields))


@pytest.mark.parametrize("bad", SELECT)
def test_selected_rows(extend_case, make_model, refuses, bad):
    case = extend_case()
    runner = case.runner(MultiLayerEagleRunner, [make_model(layer=i) for i in range(3)])
    good = {"cls": MultiLayerDraftExtendInputs, "select_index": np.array([1, 8])}

    def batch(**fields):
        return case.batch([2, 3], width=6, seed=1, **{**good, **fields})

    refuses(runner, batch(), batch(**SELECT[bad]))


@pytest.mark.parametrize(
    ("cls", "front", "field", "wrong", "expected"),
    [
        (DraftExtendRunner, 0, "num_accepted_tokens", [2, 2, 2], "num_accepted_drafts + 1"),
        (DraftExtendRunner, 0, "extend_seq_lens", [3, 2, 1], "num_accepted_tokens, the rows of"),
        (DraftExtendV2Runner, 0, "extend_seq_lens", [6, 7, 6], "1 to 6, the rows of a request"),
        (DraftExtendV2Runner, 0, "num_accepted_drafts", [1, 1, 0], "num_accepted_drafts + 1"),
        (MultiLayerEagleRunner, 0, "select_index", [1, 9, 12], "the row of the last accepted"),
        (MultiLayerEagleRunner, 0, "select_index", [1, 8, 1], "the row of the last accepted"),
        (MultiLayerEagleRunner, 2, "select_index", [3, 12, 17], "the row of the last accepted"),
    ],
)
def test_contradictions_on_the_device_are_reported_by_the_next_call(
    extend_case, make_model, cls, front, field, wrong, expected
):
    """Bound storage is read by the graph alone, as the tensors of an engine are."""
    case, forward, options, kind = extend_case(front=front), make_model(), {}, {}
    if cls is MultiLayerEagleRunner:
        forward = [make_model(layer=i) for i in range(3)]
        options, kind = {"num_front_tokens": front}, {"cls": MultiLayerDraftExtendInputs}
    width = None if cls is DraftExtendRunner else 6 + front
    batch = case.batch([2, 3, 1], width=width, seed=1, **kind)  # at size 4, with a pad request
    right = torch.from_numpy(getattr(batch, field))
    storage = torch.zeros(4, dtype=right.dtype)
    runner = case.runner(cls, forward, check=True, bound_fields={field: storage}, **options)
    slots = 1 + np.arange(batch.num_tokens)
    batch = replace(batch, out_cache_loc=slots, **{field: None})
    storage[:3] = right
    for _ in range(2):
        runner.replay(batch)
    storage[:3] = torch.tensor(wrong)
    runner.replay(batch)  # its own result is not known yet
    storage[:3] = right
    with pytest.raises(InputError, match="of an earlier replay contains") as caught:
        runner.replay(batch)
    assert expected in str(caught.value)
    assert caught.value.field == ("num_accepted_tokens" if "+ 1" in expected else field)
    runner.replay(batch)
    runner.close()
