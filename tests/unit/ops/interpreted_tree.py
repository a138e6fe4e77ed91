"""Each launcher against its op's torch reference; ``test_interpreted.py`` runs this file.

Probabilities and coins are multiples of 1/64, so that sums do not depend on their order.
"""

from __future__ import annotations

import math
import os
from functools import partial

import pytest
import torch

from graphkit.ops.kernels import sampling
from graphkit.ops.registration import OPS
from graphkit.ops.tree import build_tree, num_candidates
from graphkit.ops.tree_sampling import tree_speculative_sampling_target_only
from graphkit.ops.verification import verify_tree_greedy

assert os.environ.get("TRITON_INTERPRET") == "1", "run test_interpreted.py instead"

MAX_BLOCK = 128
SHAPES = [(0, 1, 1), (1, 5, 4), (3, 1, 4), (3, 2, 6), (4, 3, 17), (3, 8, 40)]
"""(num_steps, topk, num_draft_tokens)"""
VOCAB = 2 * MAX_BLOCK + 5
REQUESTS = 4


def launch(op, *args, **options):
    op = OPS[op.__name__]
    return op.launch(op.arguments(*args), **options)


def tree_args(num_steps, topk, width, *, damaged=False, requests=REQUESTS):
    """Draw a random selection and random parents, or any indices, as NaN scores give."""
    candidates, branches = num_candidates(num_steps, topk), max(topk * (num_steps - 1) + 1, 0)
    selected = torch.rand(requests, candidates).argsort(1)[:, : width - 1].sort(1).values
    parents = torch.randint(-1, max(candidates, 1), (requests, branches))
    if damaged:
        selected = torch.randint(-3, candidates + 3, selected.shape)
        parents = torch.randint(-3, candidates + 3, parents.shape)
        for indices in (selected, parents):
            indices.view(-1)[::5], indices.view(-1)[2::7] = 2**62, -(2**62)
    tokens, bonus = torch.randint(0, 4, (requests, width - 1)), torch.randint(0, 4, (requests,))
    seq_lens = torch.randint(0, 50, (requests,), dtype=torch.int32)
    return [bonus, parents, selected, tokens, seq_lens, num_steps, topk, width]


def walk_args(shape, damaged):
    """Return (candidates, retrieve_index, both links) of random trees; any links if damaged."""
    _, _, ids, *links, tokens = build_tree(*tree_args(*shape))
    if damaged:
        links = [torch.randint(-2, shape[2] + 2, link.shape) for link in links]
        for link in (*links, ids):
            link.view(-1)[3::5] = 2**40
        ids[1, 0] = -1
    return tokens.view(ids.shape), ids, *links


def assert_same_results(op, columns, args):
    requests, width = args[0].shape
    both = []
    for function in (op, partial(launch, op)):
        predicts = torch.full((requests * width,), -7, dtype=torch.int32)
        accept_index = torch.full((requests, columns), 99, dtype=torch.int32)
        accept_token_num = torch.full((requests,), 99, dtype=torch.int32)
        function(predicts, accept_index, accept_token_num, *args)
        both.append((predicts, accept_index, accept_token_num))
    assert all(torch.equal(*pair) for pair in zip(*both, strict=True)), both


def sampling_args(shape, vocab, damaged):
    """Rows with many probabilities of 0; damaged ones also have samples out of range."""
    tokens, *tree = walk_args(shape, damaged)
    target, draft = torch.randint(0, 24, (2, REQUESTS, shape[2], vocab)) / 64
    target *= torch.rand_like(target) < min(0.7, 60 / vocab)
    drafted = torch.tensor([32, 16, 8, 0])[:vocab]
    target[:, :, :4] = torch.randint(0, 2, (REQUESTS, shape[2], len(drafted))) * drafted / 64
    draft[::2] = 0
    coins = torch.randint(0, 64, (REQUESTS, shape[2] + 1)) / 64
    if damaged:
        tokens[:, ::2] += torch.tensor([vocab, 2**40, -1, 0])[:, None]
        target.view(-1)[:: 3 * vocab + 1] = math.nan
        target.view(-1)[:: 5 * vocab + 2] = math.inf
        target[1] = 0
        coins[[0, 2, 3], -1] = torch.tensor([-0.5, 1.0, math.nan])
    return tokens, *tree, coins[:, :-1], coins[:, -1], target, draft


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Make a vocabulary of a few hundred tokens one of several blocks."""
    monkeypatch.setattr(sampling, "MAX_BLOCK", MAX_BLOCK)


@pytest.mark.parametrize("shape", [*SHAPES, (2, 8, 70)])
@pytest.mark.parametrize("damaged", [False, True])
def test_build_tree(shape, damaged):
    args = tree_args(*shape, damaged=damaged, requests=3)
    for got, want in zip(launch(build_tree, *args), build_tree(*args), strict=True):
        assert got.dtype == want.dtype
        assert torch.equal(got, want)


def test_build_tree_of_spaced_rows_and_long_lengths():
    args = tree_args(3, 2, 6, requests=8)
    args[:5] = [tensor[::2] for tensor in args[:5]]
    args[4] = args[4].long() + 2**33
    for got, want in zip(launch(build_tree, *args), build_tree(*args), strict=True):
        assert torch.equal(got, want)


def test_build_tree_of_one_step_without_parents():
    args = tree_args(1, 5, 4)
    args[1] = args[1][:, :0]
    for got, want in zip(launch(build_tree, *args), build_tree(*args), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("shape", "dtype"), [*((shape, torch.int64) for shape in SHAPES), (SHAPES[3], torch.int32)]
)
@pytest.mark.parametrize("damaged", [False, True])
def test_verify_tree_greedy(shape, damaged, dtype):
    for columns in (1, 2, shape[0] + 1, shape[2] + 1):
        target = torch.randint(0, 4, (REQUESTS, shape[2]), dtype=dtype)
        args = (*walk_args(shape, damaged), target)
        assert_same_results(verify_tree_greedy, columns, args)


@pytest.mark.parametrize(
    ("shape", "vocab"),
    [*((shape, 7) for shape in SHAPES), (SHAPES[1], 1), (SHAPES[3], 1), (SHAPES[1], VOCAB),
     (SHAPES[4], VOCAB)],
)  # fmt: skip
@pytest.mark.parametrize("damaged", [False, True])
def test_tree_sampling(shape, vocab, damaged):
    op = tree_speculative_sampling_target_only
    for columns, thresholds in ((1, (1.0, 1.0)), (2, (0.25, 0.5)), (shape[2], (1.0, 1.0))):
        args = sampling_args(shape, vocab, damaged)
        assert_same_results(op, columns, (*args, *thresholds))
        assert_same_results(op, columns, args[:-1])


@pytest.mark.parametrize("token", [0, MAX_BLOCK - 1, MAX_BLOCK, 2 * MAX_BLOCK + 4])
def test_tree_sampling_finds_the_only_token_of_a_large_vocabulary(token):
    shape, vocab = (3, 2, 6), VOCAB
    args = sampling_args(shape, vocab, damaged=False)
    finals, target, draft = args[-3:]
    finals[1] = -0.5  # out of range, but must not draw a token of probability 0
    target.zero_()
    target[0, :, token], target[1, :, token] = 2**-20, 1
    target[2, :, token], target[3] = math.inf, -1  # no finite total: the largest is taken
    target[3, :, token] = -0.5
    draft.zero_()
    op = tree_speculative_sampling_target_only
    assert_same_results(op, 4, (*args, 1.0, 1.0))
    predicts = torch.zeros(REQUESTS * 6, dtype=torch.int32)
    rest = [torch.zeros(REQUESTS, 1, dtype=torch.int32), torch.zeros(REQUESTS, dtype=torch.int32)]
    launch(op, predicts, *rest, *args, 1.0, 1.0)
    assert predicts.view(REQUESTS, 6)[:, 0].tolist() == [token] * REQUESTS


def test_idle_batches():
    for tensor in launch(build_tree, *tree_args(3, 2, 6, requests=0)):
        assert tensor.numel() == 0
    *args, target, draft = (tensor[:0] for tensor in sampling_args((3, 2, 6), 9, damaged=False))
    assert_same_results(verify_tree_greedy, 3, (*args[:4], args[0]))
    op = tree_speculative_sampling_target_only
    assert_same_results(op, 3, (*args, target, draft, 1.0, 1.0))
