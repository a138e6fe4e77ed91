"""tree_speculative_sampling_target_only on every device against a walk in plain Python.

Probabilities and coins are multiples of 1/64, so that no sum rounds.
"""

from __future__ import annotations

import math

import pytest
import torch

from graphkit.errors import ConfigError, InputError
from graphkit.graphs import RecorderBackend
from graphkit.ops.kernels import sampling
from graphkit.ops.registration import OPS
from graphkit.ops.tree_sampling import tree_speculative_sampling_target_only
from op_devices import CUDA, INTERPRETER, by, by_each

UNTOUCHED = -7
NAN, INF = math.nan, math.inf
DRAFTED = torch.tensor([32, 16, 8, 0]) / 64
BLOCK = 128
LARGE = 2 * BLOCK + 5
"""Tokens of a block of the interpreter, and a vocabulary of several blocks."""


def results(requests, width, columns):
    """Return outputs filled with values that the op must replace."""
    return (
        torch.full((requests * width,), UNTOUCHED, dtype=torch.int32),
        torch.full((requests, columns), 99, dtype=torch.int32),
        torch.full((requests,), 99, dtype=torch.int32),
    )


def random_args(requests, width, vocab, seed, damaged):
    """Trees of few distinct tokens, so that siblings share some. Rows have few probabilities."""
    torch.manual_seed(seed)
    links = torch.full((2, requests, width), -1)
    for b in range(requests):
        last_child = {}
        for node in range(1, width):
            parent = int(torch.randint(max(node // 2, 1), ()))
            at = (0, b, parent) if parent not in last_child else (1, b, last_child[parent])
            links[at] = node
            last_child[parent] = node
    tokens = torch.randint(0, min(vocab, 4), (requests, width))
    target, draft = torch.randint(0, 24, (2, requests, width, vocab)) / 64
    target *= torch.rand_like(target) < min(0.7, 60 / vocab)
    if vocab > 7:  # else few of many tokens were drafted
        target[:, :, :4] = torch.randint(0, 2, (requests, width, 4)) * DRAFTED
    draft *= torch.rand(requests, 1, 1) < 0.5
    if damaged:
        links = torch.randint(-2, width + 2, links.shape)
        tokens = torch.randint(-1, vocab + 2, tokens.shape)
        target.view(-1)[:: 3 * vocab + 1] = NAN
        target.view(-1)[:: 5 * vocab + 2] = INF
        target[:1] = 0
    ids = torch.arange(requests * width).view(requests, width)
    coins = torch.randint(0, 64, (requests, width + 1)) / 64
    return tokens, ids, *links, coins[:, :width], coins[:, width], target, draft


def draw(weights, row, coin):
    """The token after the last accepted node."""
    total = sum(weights)
    if not 0 < total < INF:
        return max(range(len(row)), key=lambda word: -INF if math.isnan(row[word]) else row[word])
    running = 0.0
    for word, weight in enumerate(weights):
        running += weight
        if running > coin * total:
            return word
    raise AssertionError("coins below 1 always find one")


def walk(predicts, accept_index, accept_token_num, tokens, ids, next_token, next_sibling,
         coins, finals, target, draft, single, acc):  # fmt: skip
    """The contract, request by request."""
    requests, width, vocab = target.shape
    accept_index.fill_(-1)
    for b in range(requests):
        path, tries, summed, refused = [0], 0, 0.0, set()
        child = int(next_token[b, 0])
        while 0 <= child < width and tries < width - 1 and len(path) < accept_index.shape[1]:
            tries += 1
            node, token = path[-1], int(tokens[b, child])
            fresh = 0 <= token < vocab and token not in refused
            p = float(target[b, node, token]) if fresh else 0.0
            p = p if p > 0 else 0.0
            summed += p
            if p > 0 and (float(coins[b, node]) * acc < summed or p >= single):
                predicts[ids[b, node]] = token
                path.append(child)
                summed, refused = 0.0, set()
                child = int(next_token[b, child])
            else:
                refused.add(token)
                child = int(next_sibling[b, child])
        row = target[b, path[-1]].tolist()
        left = [0.0 if word in refused else p for word, p in enumerate(row)]
        less = [p - q for p, q in zip(left, draft[b, path[-1]].tolist(), strict=True)]
        weights = [0.0 if weight <= 0 else weight for weight in less]
        predicts[ids[b, path[-1]]] = draw(weights, row, float(finals[b]))
        accept_index[b, : len(path)] = ids[b, path]
        accept_token_num[b] = len(path) - 1


@pytest.mark.parametrize("width", [1, 2, 5, 12])
@pytest.mark.parametrize("vocab", [1, 3, 7])
@pytest.mark.parametrize("damaged", [False, True])
@pytest.mark.parametrize("thresholds", [(1.0, 1.0), (0.25, 0.5), (0.0, 0.0)])
def test_matches_a_walk_in_plain_python(width, vocab, damaged, thresholds):
    for columns in (1, 2, width + 1):
        args = (*random_args(12, width, vocab, columns, damaged), *thresholds)
        got, want = results(12, width, columns), results(12, width, columns)
        tree_speculative_sampling_target_only(*got, *args)
        walk(*want, *args)
        assert all(torch.equal(*pair) for pair in zip(got, want, strict=True))


def assert_as_the_reference(run, columns, args):
    requests, width = args[0].shape
    got, want = results(requests, width, columns), results(requests, width, columns)
    run(tree_speculative_sampling_target_only, *got, *args)
    tree_speculative_sampling_target_only(*want, *args)
    assert all(torch.equal(*pair) for pair in zip(got, want, strict=True))


@pytest.fixture
def small_blocks(monkeypatch):
    """Make a vocabulary of a few hundred tokens one of several blocks."""
    monkeypatch.setattr(sampling, "MAX_BLOCK", BLOCK)


@by_each("vocab", interpreter=[1, 7, LARGE], cuda=[1, 3, 40, LARGE, 4097])
@pytest.mark.parametrize("width", [1, 4, 6, 17, 64, 256])
@pytest.mark.parametrize("damaged", [False, True])
def test_kernels_match_the_reference(run, width, vocab, damaged, request):
    """Damaged cases have samples out of range, too."""
    if run is INTERPRETER:
        request.getfixturevalue("small_blocks")
        if width > 17:
            pytest.skip("takes the interpreter long")
    for columns, thresholds in ((1, (1.0, 1.0)), (2, (0.25, 0.5)), (width, (1.0, 1.0))):
        args = random_args(7, width, vocab, columns, damaged)
        if damaged:
            args[5][-3:] = torch.tensor([-0.5, 1.0, NAN])
        assert_as_the_reference(run, columns, (*args, *thresholds))
        assert_as_the_reference(run, columns, args[:-1])


@by(CUDA)
@pytest.mark.parametrize("requests", [0, 9])
@pytest.mark.parametrize("vocab", [128_256, 151_937])
def test_a_large_vocabulary(run, requests, vocab):
    args = random_args(max(requests, 2), 6, vocab, 0, damaged=False)
    assert_as_the_reference(run, 4, (*(arg[:requests] for arg in args), 1.0, 1.0))


@by(INTERPRETER)
@pytest.mark.parametrize("token", [0, BLOCK - 1, BLOCK, 2 * BLOCK + 4])
def test_the_only_token_of_a_large_vocabulary_is_found(run, token, small_blocks):
    args = random_args(4, 6, LARGE, 0, damaged=False)
    finals, target, draft = args[-3:]
    finals[1] = -0.5  # out of range, but must not draw a token of probability 0
    target.zero_()
    target[0, :, token], target[1, :, token] = 2**-20, 1
    target[2, :, token], target[3] = INF, -1  # no finite total: the largest is taken
    target[3, :, token] = -0.5
    draft.zero_()
    assert_as_the_reference(run, 4, (*args, 1.0, 1.0))
    out = results(4, 6, 1)
    run(tree_speculative_sampling_target_only, *out, *args, 1.0, 1.0)
    assert out[0].view(4, 6)[:, 0].tolist() == [token] * 4


@by_each("width", cpu=[4], interpreter=[6])
def test_an_idle_batch(run, width):
    args = random_args(0, width, 9, 0, damaged=False)
    assert_as_the_reference(run, 3, (*args, 1.0, 1.0))


def test_recorded_and_traced():
    op = tree_speculative_sampling_target_only
    args, later = (random_args(5, 8, 6, seed, damaged=False) for seed in (0, 1))
    got, want = results(5, 8, 4), results(5, 8, 4)
    checks = ("test_schema", "test_faketensor")
    overload = torch.ops.graphkit.tree_speculative_sampling_target_only.default
    torch.library.opcheck(overload, (*results(5, 8, 4), *args, 1.0, 1.0), test_utils=checks)
    graph = RecorderBackend().capture(lambda: op(*got, *args, 1.0, 1.0))
    for tensor, new in zip((*got, *args), (*want, *later), strict=True):
        tensor.copy_(new)
    graph.replay()
    walk(*want, *later, 1.0, 1.0)
    assert all(torch.equal(*pair) for pair in zip(got, want, strict=True))


@pytest.mark.parametrize(
    ("at", "change", "text"),
    [
        (0, lambda t: t.long(), "predicts"),
        (3, lambda t: t.int(), "candidates"),
        (7, lambda t: t.double(), r"uniform_samples is \[2, 8\] float64"),
        (7, lambda t: t[:, 1:], r"uniform_samples is \[2, 7\]"),
        (8, lambda t: t[:, None], r"uniform_samples_for_final_sampling is \[2, 1\]"),
        (9, lambda t: t.half(), "target_probs is .* float16"),
        (9, lambda t: t.flatten(0, 1), "target_probs"),
        (9, lambda t: t[:, :, :0], r"target_probs is \[2, 8, 0\]"),
        (10, lambda t: t[:, :, 1:], r"draft_probs is \[2, 8, 5\] .* expected .* = \[2, 8, 6\]"),
        (10, lambda t: t.to("meta"), "draft_probs .* on meta"),
        (11, lambda _: 1.5, "threshold_single is 1.5, expected 0 to 1"),
        (12, lambda _: NAN, "threshold_acc is nan"),
    ],
)
def test_refuses(at, change, text):
    args = [*results(2, 8, 4), *random_args(2, 8, 6, 0, damaged=False), 1.0, 1.0]
    args[at] = change(args[at])
    with pytest.raises((InputError, ConfigError), match=text) as caught:
        OPS["tree_speculative_sampling_target_only"].run_reference(*args)  # a fake checks nothing
    assert caught.value.field
