"""The ops of a whole step on every device, against models in plain Python and their references."""

from __future__ import annotations

import pytest
import torch

from graphkit.errors import ConfigError, InputError
from graphkit.ops import processors
from graphkit.ops.kernels import (
    logits,
    ngram,
    processors as processor_kernels,
    sampling,
    step_rows,
    target_probs as probs_kernels,
    tree_growth,
)
from graphkit.ops.logits import apply_token_bitmask, argmax_rows, top_candidates
from graphkit.ops.ngram import ngram_drafts
from graphkit.ops.sampling import target_samples
from graphkit.ops.step_rows import draft_step_rows, verify_rows
from graphkit.ops.target_probs import target_probs
from graphkit.ops.tree import chain_candidates
from graphkit.ops.tree_growth import choose_nodes, grow_tree
from graphkit.ops.verification import accept_tokens
from op_devices import CPU, CUDA, INTERPRETER, by, by_each
from sanitized import sanitized
from step_cases import CASES, WRITTEN, assert_equal, results

of_numpy = pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")
"""Warnings of the interpreter for infinite scores and temperatures near 0."""


@pytest.fixture
def small_blocks(monkeypatch):
    """Let small cases need several blocks."""
    monkeypatch.setattr(logits, "MAX_BLOCK", 64)
    monkeypatch.setattr(logits, "LEAST_PART", 32)
    for name, size in {"CHUNK": 128, "TILE": 64, "BLOCK": 128, "WRITERS": 10}.items():
        monkeypatch.setattr(probs_kernels, name, size)
    monkeypatch.setattr(sampling, "MAX_BLOCK", 4)
    monkeypatch.setattr(step_rows, "MAX_NODES", 4)
    monkeypatch.setattr(tree_growth, "MAX_OTHERS", 8)
    monkeypatch.setattr(ngram, "MAX_BLOCK", 16)
    monkeypatch.setattr(logits, "BITMASK_BLOCK", 64)
    for module in (processors, processor_kernels):
        monkeypatch.setattr(module, "PART", 128)
    monkeypatch.setattr(processor_kernels, "PROGRAMS", 10)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("requests", [0, 1, 2, 7])
def test_random_cases(name, requests):
    op, make, model = CASES[name]
    for seed in range(12):
        args = make(requests, seed)
        assert_equal(results(op, op(*args), args), model(*args))


@of_numpy
@by_each("requests", interpreter=[0, 3], cuda=[*sanitized(0, 1, 3), 64, 300])
@pytest.mark.parametrize("name", CASES)
def test_kernels_match_the_references(run, name, requests, request):
    op, make, _ = CASES[name]
    if run is INTERPRETER:
        request.getfixturevalue("small_blocks")
    for seed in range(6 if run is INTERPRETER else 12):
        ours, theirs = make(requests, seed), make(requests, seed)
        got = results(op, run(op, *ours), ours)
        assert_equal(got, results(op, op(*theirs), theirs))


@of_numpy
@by(INTERPRETER)
@pytest.mark.parametrize("name", CASES)
def test_inputs_may_be_strided(run, name, small_blocks):
    op, make, _ = CASES[name]
    args, theirs = make(3, 4), make(3, 4)
    spaced = [
        each.repeat_interleave(2, -1)[..., ::2] if isinstance(each, torch.Tensor) else each
        for each in args
    ]
    written = WRITTEN.get(op, 0)
    spaced[:written] = args[:written]
    got = results(op, run(op, *spaced), spaced)
    assert_equal(got, results(op, op(*theirs), theirs))


@by(INTERPRETER)
def test_many_refused_siblings(run, small_blocks):
    op, make, _ = CASES["accept_by_rejection"]
    args = make(90, 7)
    assert_equal(run(op, *args), op(*args))


@of_numpy
@by(CPU, INTERPRETER, CUDA)
def test_all_visits_of_a_cycle_have_the_token_after_the_last(run, small_blocks):
    """The root and node 1 are each other's first child. The bonus token follows node 1."""
    op, make, _ = CASES["accept_by_rejection"]
    draws = make(1, 2)[5:8]
    tokens, child = torch.tensor([[3, 4, 0, 0]]), torch.tensor([[1, 0, -1, -1]])
    target, draft = torch.zeros(2, 4, 7)
    target[0, 4] = draft[0, 4] = 1
    target[1, 3], target[1, 5], draft[1, 3], draft[1, 6] = 0.02, 0.98, 0.01, 0.99
    predict, path, *_ = run(op, tokens, child, -torch.ones_like(child), target, draft, *draws, 4)
    assert path.tolist() == [[0, 1, 0, 1]]
    assert predict.tolist() == [4, 5, 4, 5]


@pytest.mark.parametrize("name", CASES)
def test_the_schema_and_the_fake_are_those_of_the_op(name):
    """Compiled functions rely on what is written, what is shared, and the shapes of results."""
    op, make, _ = CASES[name]
    overload = getattr(torch.ops.graphkit, op.__name__).default
    torch.library.opcheck(overload, make(3, 4), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("name", CASES)
def test_inputs_are_not_changed(name):
    op, make, _ = CASES[name]
    args = make(5, 3)
    inputs = [each for each in args if isinstance(each, torch.Tensor)]
    before = [each.clone() for each in inputs]
    op(*args)
    for one, other in list(zip(inputs, before, strict=True))[WRITTEN.get(op, 0) :]:
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


INT = torch.zeros(2, dtype=torch.int64)
DRAWN = INT, torch.zeros(2), INT.int(), torch.ones(2), torch.zeros(2)
REFUSED = [
    (lambda: argmax_rows(INT, torch.zeros(3, 4)), r"logits is \[3, 4\].*expected \[2, V\], a row"),
    (lambda: argmax_rows(INT, torch.zeros(2, 4).int()), "int32 on cpu, expected .* floating-point"),
    (lambda: argmax_rows(INT, torch.zeros(2, 0)), r"expected .* = \[2, 1\]"),
    (
        lambda: argmax_rows(INT, torch.zeros(0, 4), INT),
        r"argmax_rows: logits is \[0, 4\].*expected at least one row for the 2 rows of index",
    ),
    (
        lambda: argmax_rows(INT, torch.zeros(2, 4), None, INT),
        r"token_map is \[2\] .*expected \[V\] = \[4\] int64",
    ),
    (lambda: chain_candidates(INT[:, None], INT[None], 4), "is 4, expected 1 to 3 = F "),
    (lambda: draft_step_rows(INT, INT, INT.int(), 2, 1), r"positions is \[2\].* = \[4\]"),
    (lambda: top_candidates(torch.zeros(2, 4), 5), "topk is 5, expected 1 to 4 = V"),
    (lambda: top_candidates(torch.zeros(2, 4), 2, torch.ones(1)), r"expected \[2\] float32"),
    (
        lambda: top_candidates(torch.zeros(0, 4), 2, None, INT),
        r"top_candidates: logits is \[0, 4\].*expected at least one row for the 2 rows of index",
    ),
    (
        lambda: top_candidates(torch.zeros(2, 2), 1, None, None, INT.int()),
        "token_map is .* int32 on cpu, expected .* int64",
    ),
    (lambda: choose_nodes(torch.zeros(2, 4), INT.repeat(2, 2), 6), "is 6, expected 1 to 5 = N "),
    (
        lambda: ngram_drafts(INT.view(1, 2), INT[:1], INT[:1].int(), INT[:1], 3, 4),
        "topk is 3, expected 1 to 2 = C",
    ),
    (lambda: grow_tree(*CASES["grow_tree"][1](2, 1)[:-1], 9), "step is 9"),
    (lambda: target_probs(INT[:, None], *DRAWN, 1), "expected .* floating-point"),
    (
        lambda: target_samples(torch.zeros(3, 4), INT, INT, INT[:, None]),
        r"target_probs is \[3, 4\].* = \[2, V\] float32",
    ),
    (lambda: target_probs(torch.zeros(3, 4), *DRAWN, 1), r"logits is .* = \[2, V\]"),
    (
        lambda: apply_token_bitmask(torch.zeros(2, 33), INT[:, None].int()),
        r"bitmask is \[2, 1\] .* = \[2, 2\] int32",
    ),
    (lambda: apply_token_bitmask(INT[:, None], INT[:, None].int()), "expected .* floating-point"),
    (
        lambda: accept_tokens(INT[:, None], INT[:, None], INT[:, None], INT, 2),
        "accept_tokens: longest_path is 2, expected 1 to 1 = W",
    ),
    (
        lambda: verify_rows(INT, INT[None], INT.int(), INT, INT, None, 3, 7),
        r"draft_tokens is \[2\].* = \[6\]",
    ),
]


@pytest.mark.parametrize(("call", "text"), REFUSED)
def test_wrong_arguments_are_refused(call, text):
    with pytest.raises((InputError, ConfigError), match=text):
        call()
