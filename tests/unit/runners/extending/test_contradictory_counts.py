"""Counts that contradict each other are refused by every way into a graph, in every mode.

Tokens are drafts plus the bonus token. A graph that reads other counts selects another row, and
returns it without an error.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from graphkit import (
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


def staged(runner):
    def replay(batch):
        entry = runner.stage(batch.batch_size)
        for name, rows in vars(batch).items():
            if rows is not None:
                setattr(entry, name, rows)
        return entry.replay()

    return replay


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


def refuses(runner, good, bad, assert_in_step):
    wanted = {name: rows.clone() for name, rows in runner.replay(good).tensors().items()}
    for run in (runner.replay, runner.run, runner.fall_back, staged(runner)):
        with pytest.raises(InputError) as caught:
            run(bad)
        assert caught.value.field in str(caught.value)
    assert runner.can_replay(bad).kind is Reason.BAD_FIELD
    for run in (runner.replay, staged(runner)):
        for name, rows in run(good).tensors().items():
            assert torch.equal(rows, wanted[name]), name
    assert runner.stats.fallbacks == {}
    assert_in_step(runner)


@pytest.mark.parametrize("kind", [lambda rows: rows, torch.from_numpy], ids=["numpy", "torch"])
@pytest.mark.parametrize("bad", BAD)
def test_counts(runner_and_batch, assert_in_step, bad, kind):
    runner, batch = runner_and_batch
    fields = {name: kind(rows) for name, rows in BAD[bad].items()}
    refuses(runner, batch(), batch(**fields), assert_in_step)


@pytest.mark.parametrize("bad", SELECT)
def test_selected_rows(extend_case, make_model, assert_in_step, bad):
    case = extend_case()
    runner = case.runner(MultiLayerEagleRunner, [make_model(layer=i) for i in range(3)])
    good = {"cls": MultiLayerDraftExtendInputs, "select_index": np.array([1, 8])}

    def batch(**fields):
        return case.batch([2, 3], width=6, seed=1, **{**good, **fields})

    refuses(runner, batch(), batch(**SELECT[bad]), assert_in_step)
