"""The ops of a whole step against models in plain Python."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

from graphkit.errors import ConfigError, InputError
from graphkit.ops.logits import apply_token_bitmask, argmax_rows, top_candidates
from graphkit.ops.ngram import ngram_drafts
from graphkit.ops.sampling import target_samples
from graphkit.ops.step_rows import draft_step_rows, verify_rows
from graphkit.ops.target_probs import target_probs
from graphkit.ops.tree import chain_candidates
from graphkit.ops.tree_growth import choose_nodes, grow_tree
from graphkit.ops.verification import accept_tokens

CASES, WRITTEN, results, assert_equal = map(
    runpy.run_path(str(Path(__file__).with_name("step_cases.py"))).get,
    ("CASES", "WRITTEN", "results", "assert_equal"),
)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("requests", [0, 1, 2, 7])
def test_random_cases(name, requests):
    op, make, model = CASES[name]
    for seed in range(12):
        args = make(requests, seed)
        assert_equal(results(op, op(*args), args), model(*args))


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


@pytest.mark.parametrize("filters", [(0, 1.0, 0.0), (50, 1.0, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.01)])
def test_samples_do_not_depend_on_the_other_rows(filters):
    """Bit by bit, with several threads, which may share the work of a single row."""
    threads, vocab = torch.get_num_threads(), 70_000
    logits = torch.randn(8, vocab, generator=torch.Generator().manual_seed(0))
    seeds, positions = INT[:1] + 5, torch.arange(8).view(2, 4)
    temperature, top_k, top_p, min_p = (torch.tensor([number]) for number in (1.5, *filters))
    settings = temperature, top_k.int(), top_p, min_p

    def drawn(some, width):
        rows = torch.zeros(some.numel() // width, dtype=torch.int64)
        probs = target_probs(logits[some], rows, *settings, width)
        return probs, target_samples(probs, rows, seeds, some.view(-1, width))

    torch.set_num_threads(2)
    try:
        together = drawn(positions.flatten(), 4)
        alone = [drawn(each, 1) for each in positions.flatten()[:, None]]
    finally:
        torch.set_num_threads(threads)
    for one, other in zip(together, zip(*alone, strict=True), strict=True):
        assert torch.equal(one, torch.cat(other))


def test_a_sample_is_never_a_token_of_probability_0():
    """Even where the running sum reaches the largest sample only with the last token."""
    probs = torch.zeros(50_000, 9)
    probs[:, 3], probs[:, 5] = 1e-30, 3e-30
    rows = torch.arange(50_000)
    drawn = target_samples(probs, rows, rows, rows[:, None])
    assert set(drawn.tolist()) == {3, 5}
    assert drawn.float().mean().sub(4.5).abs() < 0.02


def test_a_bitmask_applies_to_a_view_of_the_logits():
    logits = torch.zeros(4, 80)
    apply_token_bitmask(logits[::2, 1::2], torch.tensor([[-1, -1], [5, 0]], dtype=torch.int32))
    refused = (logits == -torch.inf).nonzero().tolist()
    assert refused == [[2, 1 + 2 * token] for token in range(40) if token not in (0, 2)]
