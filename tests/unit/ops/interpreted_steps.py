"""Launchers of the ops of a whole step against their references; see ``test_interpreted.py``."""

from __future__ import annotations

import math
import os
import runpy
from itertools import product
from pathlib import Path

import pytest
import torch

from graphkit.ops.kernels import logits, ngram, sampling, step_rows, target_probs, tree_growth
from graphkit.ops.registration import OPS

assert os.environ.get("TRITON_INTERPRET") == "1", "run test_interpreted.py instead"

pytestmark = [  # of numpy, for infinite scores and temperatures near 0
    pytest.mark.filterwarnings("ignore:overflow"),
    pytest.mark.filterwarnings("ignore:invalid value"),
]
CASES, WRITTEN, results, assert_equal = map(
    runpy.run_path(str(Path(__file__).with_name("step_cases.py"))).get,
    ("CASES", "WRITTEN", "results", "assert_equal"),
)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Let small cases need several blocks."""
    monkeypatch.setattr(logits, "MAX_BLOCK", 64)
    for name, size in {"CHUNK": 128, "TILE": 64, "BLOCK": 128, "WRITERS": 10}.items():
        monkeypatch.setattr(target_probs, name, size)
    monkeypatch.setattr(sampling, "MAX_BLOCK", 4)
    monkeypatch.setattr(step_rows, "MAX_NODES", 4)
    monkeypatch.setattr(tree_growth, "MAX_OTHERS", 8)
    monkeypatch.setattr(ngram, "MAX_BLOCK", 16)
    monkeypatch.setattr(logits, "BITMASK_BLOCK", 64)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("requests", [0, 3])
def test_launchers_match_the_references(name, requests):
    op, make, _ = CASES[name]
    registered = OPS[op.__name__]
    for seed in range(6):
        ours, theirs = make(requests, seed), make(requests, seed)
        got = results(op, registered.launch(registered.arguments(*ours)), ours)
        assert_equal(got, results(op, op(*theirs), theirs))


def test_many_refused_siblings():
    _, make, _ = CASES["accept_by_rejection"]
    args, op = make(90, 7), OPS["accept_by_rejection"]
    assert_equal(op.launch(op.arguments(*args)), op.reference(*args))


@pytest.mark.parametrize("vocab", [9, 64, 65, 300])
@pytest.mark.parametrize("topk", [1, 2, 9])
def test_equal_candidates_are_in_the_order_of_their_ids(vocab, topk):
    torch.manual_seed(vocab)
    logits = torch.randint(0, 3, (6, vocab)).float()
    logits[3], logits[4, (topk + 1) // 2 :] = 0, -torch.inf
    logits[5], logits[5, 5 % vocab :: 64] = -1, 1  # in one lane
    op = OPS["top_candidates"]
    probs, tokens = op.launch(op.arguments(logits, topk))
    want = logits.sort(dim=1, descending=True, stable=True).indices[:, :topk]
    assert torch.equal(tokens, want)
    torch.testing.assert_close(probs, logits.softmax(1).gather(1, want))
    logits[:, 1] = torch.nan
    probs, tokens = op.launch(op.arguments(logits, topk))
    assert probs.isnan().all()
    assert 0 <= tokens.min() <= tokens.max() < vocab


@pytest.mark.parametrize("is_tied", [False, True])
def test_every_combination_of_filters(is_tied):
    """The sums of tied weights are the same in any order, so that no rounding decides."""
    torch.manual_seed(5)
    logits = torch.randint(0, 3, (12, 99)) * math.log(2) if is_tied else torch.randn(12, 99)
    filters = list(product([0, 1, 20], [1.0, 0.7], [0.0, 0.1]))
    top_ks, top_ps, min_ps = (torch.tensor(each) for each in zip(*filters, strict=True))
    rows = torch.arange(12)
    args = logits, rows, torch.ones(12), top_ks.int(), top_ps, min_ps, 1
    op = OPS["target_probs"]
    assert_equal([op.launch(op.arguments(*args))], [op.reference(*args)])


@pytest.mark.parametrize("filters", [(2, 1.0, 0.0), (0, 0.9, 0.0), (2, 0.5, 0.5), (0, 1.0, 1.0)])
def test_rounding_makes_weights_of_different_logits_equal(filters):
    """All pass then, in all chunks and on both sides of each sampled bound."""
    logits = torch.randn(1, 300, generator=torch.Generator().manual_seed(1))
    row, (top_k, top_p, min_p) = torch.zeros(1), filters
    args = logits, row.long(), row + 1e30, row.int() + top_k, row + top_p, row + min_p, 1
    op = OPS["target_probs"]
    torch.testing.assert_close(op.launch(op.arguments(*args)), torch.full((1, 300), 1 / 300))


@pytest.mark.parametrize("name", CASES)
def test_inputs_may_be_strided(name):
    op, make, _ = CASES[name]
    registered = OPS[op.__name__]
    args = make(3, 4)
    spaced = [
        each.repeat_interleave(2, -1)[..., ::2] if isinstance(each, torch.Tensor) else each
        for each in args
    ]
    written = WRITTEN.get(op, 0)
    spaced[:written] = args[:written]
    got = results(op, registered.launch(registered.arguments(*spaced)), spaced)
    theirs = make(3, 4)
    assert_equal(got, results(op, op(*theirs), theirs))
