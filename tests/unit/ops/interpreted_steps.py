"""Launchers of the ops of a whole step against their references; see ``test_interpreted.py``."""

from __future__ import annotations

import math
import os
import runpy
from itertools import product
from pathlib import Path

import pytest
import torch

from graphkit.ops import processors
from graphkit.ops.kernels import (
    logits,
    ngram,
    processors as processor_kernels,
    sampling,
    step_rows,
    target_probs,
    tree_growth,
)
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
    monkeypatch.setattr(logits, "LEAST_PART", 32)
    for name, size in {"CHUNK": 128, "TILE": 64, "BLOCK": 128, "WRITERS": 10}.items():
        monkeypatch.setattr(target_probs, name, size)
    monkeypatch.setattr(sampling, "MAX_BLOCK", 4)
    monkeypatch.setattr(step_rows, "MAX_NODES", 4)
    monkeypatch.setattr(tree_growth, "MAX_OTHERS", 8)
    monkeypatch.setattr(ngram, "MAX_BLOCK", 16)
    monkeypatch.setattr(logits, "BITMASK_BLOCK", 64)
    for module in (processors, processor_kernels):
        monkeypatch.setattr(module, "PART", 128)
    monkeypatch.setattr(processor_kernels, "PROGRAMS", 10)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("requests", [0, 3])
def test_launchers_match_the_references(name, requests):
    op, make, _ = CASES[name]
    registered = OPS[op.__name__]
    for seed in range(6):
        ours, theirs = make(requests, seed), make(requests, seed)
        got = results(op, registered.launch(registered.arguments(*ours)), ours)
        assert_equal(got, results(op, op(*theirs), theirs))


def best_of(rows, index=None, token_map=None):
    """Run ``argmax_rows``; return its tokens and the number of parts of each row."""
    tokens = torch.full((len(rows) if index is None else len(index),), -7)
    op = OPS["argmax_rows"]
    op.launch(op.arguments(tokens, rows, index, token_map))
    part = logits.argmax_part(len(tokens), rows.shape[1])
    return tokens, -(-rows.shape[1] // part)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("vocab", "parts"), [(191, 1), (192, 1), (193, 7), (257, 9), (640, 20)])
def test_the_first_largest_of_rows_in_parts(vocab, parts, dtype):
    """Ties within a part and across parts, in the first and the last column, NaN and infinities."""
    torch.manual_seed(vocab)
    rows = torch.randn(9, vocab).to(dtype)
    rows[0] = 0
    rows[1] = -torch.inf
    rows[2, [vocab - 1, vocab // 2, 33]] = 9
    rows[3, [31, 32]] = 9
    rows[4, vocab - 1] = torch.inf
    rows[5, vocab // 2 :: 50], rows[5, 3] = torch.nan, torch.inf
    rows[6, [vocab - 1, 64]] = torch.nan
    rows[7], rows[7, vocab - 1] = -torch.inf, -3e38
    rows[8, [40, 170]] = torch.tensor([0.0, -0.0], dtype=dtype) + 0
    rows[8, :40], rows[8, 41:170], rows[8, 171:] = -1, -1, -1
    index, token_map = torch.tensor([8, 0, 0, 5, 3, 2]), torch.randperm(vocab)
    assert best_of(rows)[1] == parts
    assert torch.equal(best_of(rows)[0], rows.argmax(-1))
    assert torch.equal(best_of(rows, index)[0], rows[index].argmax(-1))
    assert torch.equal(best_of(rows, index, token_map)[0], token_map[rows[index].argmax(-1)])


@pytest.mark.parametrize(("rows", "parts"), [(1, 22), (9, 11), (16, 6), (40, 3), (60, 2), (300, 1)])
def test_parts_have_more_columns_for_more_rows(rows, parts, monkeypatch):
    """A part of several blocks may end behind the last column."""
    monkeypatch.setattr(logits, "MOST_PROGRAMS", 130)
    values = torch.randint(0, 50, (rows, 701)).float()
    tokens, number = best_of(values)
    assert number == parts
    assert torch.equal(tokens, values.argmax(-1))


@pytest.mark.parametrize(
    ("rows", "vocab", "parts"),
    [
        (1, 128_256, 63), (6, 128_256, 32), (16, 128_256, 16), (48, 128_256, 4),
        (132, 128_256, 2), (133, 128_256, 1), (8, 32_000, 16), (16, 32_000, 16), (66, 32_000, 4),
        (67, 32_000, 1), (1, 24_576, 1), (1, 24_577, 13), (0, 128_256, 63), (300, 128_256, 1),
    ],
)  # fmt: skip
def test_parts_of_real_vocabularies(rows, vocab, parts, monkeypatch):
    """Up to two programs per multiprocessor, unless few reads are saved."""
    monkeypatch.setattr(logits, "MAX_BLOCK", 8192)
    monkeypatch.setattr(logits, "LEAST_PART", 2048)
    assert -(-vocab // logits.argmax_part(rows, vocab)) == parts


def test_many_refused_siblings():
    _, make, _ = CASES["accept_by_rejection"]
    args, op = make(90, 7), OPS["accept_by_rejection"]
    assert_equal(op.launch(op.arguments(*args)), op.reference(*args))


@pytest.mark.parametrize("vocab", [9, 64, 65, 300])
@pytest.mark.parametrize("topk", [1, 2, 9])
def test_equal_candidates_are_in_the_order_of_their_ids(vocab, topk):
    """Up to 64 tokens are one part. Others have parts of 32, the last of which may have 1 token."""
    torch.manual_seed(vocab)
    logits = torch.randint(0, 3, (6, vocab)).float()
    logits[3], logits[4, (topk + 1) // 2 :] = 0, -torch.inf
    logits[5], logits[5, 5 % vocab :: 64] = -1, 1
    op = OPS["top_candidates"]
    probs, tokens = op.launch(op.arguments(logits, topk))
    want = logits.sort(dim=1, descending=True, stable=True).indices[:, :topk]
    assert torch.equal(tokens, want)
    torch.testing.assert_close(probs, logits.softmax(1).gather(1, want))
    logits[:, 1] = torch.nan
    probs, tokens = op.launch(op.arguments(logits, topk))
    assert probs.isnan().all()
    assert 0 <= tokens.min() <= tokens.max() < vocab


@pytest.mark.parametrize("vocab", [40, 300])
def test_candidates_of_rows_without_a_finite_sum(vocab):
    """The tokens are those of the largest scores, and NaN counts as -inf."""
    rows = torch.zeros(4, vocab)
    rows[0] = -torch.inf
    rows[1, vocab - 2] = torch.inf
    rows[2, 3] = torch.nan
    rows[3] = torch.nan
    op = OPS["top_candidates"]
    probs, tokens = op.launch(op.arguments(rows, 3))
    assert probs.isnan().all()
    assert tokens.tolist() == [[0, 1, 2], [vocab - 2, 0, 1], [0, 1, 2], [0, 1, 2]]


@pytest.mark.parametrize("vocab", [40, 300])
def test_candidates_of_rows_with_few_finite_scores(vocab):
    """Parts without a finite score count nothing."""
    rows = torch.full((2, vocab), -torch.inf)
    rows[0, [5, 37]], rows[1, 39] = torch.tensor([0.0, math.log(3)]), -1
    op = OPS["top_candidates"]
    probs, tokens = op.launch(op.arguments(rows, 4))
    torch.testing.assert_close(probs, torch.tensor([[0.75, 0.25, 0, 0], [1, 0, 0, 0]]))
    assert tokens.tolist() == [[37, 5, 0, 1], [39, 0, 1, 2]]


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
