"""The tree kernels against their CPU references, at sizes up to 256 nodes and 128k tokens.

Probabilities and coins are multiples of a power of 2, so that sums do not depend on their order;
where they are any numbers, the tokens must follow the target's distribution (chi-square).
"""

from __future__ import annotations

import math

import pytest
import torch

from graphkit.ops.tree import build_tree, num_candidates
from graphkit.ops.tree_sampling import tree_speculative_sampling_target_only
from graphkit.ops.verification import verify_tree_greedy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SHAPES = [(0, 1, 1), (1, 5, 4), (3, 1, 4), (3, 2, 6), (4, 3, 17), (5, 8, 64), (3, 16, 256)]
"""(num_steps, topk, num_draft_tokens)"""
VOCAB, ROOT = 6, 5
CHAIN = [1, 2, 3, -1], [-1, -1, -1, -1]
TREE = [1, 4, 7, -1, -1, -1, -1, -1], [-1, 2, 3, -1, 5, 6, -1, -1]


def tree_args(num_steps, topk, width, requests, damaged=False):
    """A random selection under random parents, or indices as scores of NaN leave them."""
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


def walk_args(shape, requests, damaged=False):
    """(candidates, retrieve_index, both links) of random trees, or links that are any numbers."""
    _, _, ids, *links, tokens = build_tree(*tree_args(*shape, requests))
    if damaged:
        links = [torch.randint(-2, shape[2] + 2, link.shape) for link in links]
        for link in (*links, ids):
            link.view(-1)[3::5] = 2**40
    return tokens.view(ids.shape), ids, *links


def sampling_args(shape, requests, vocab, damaged=False):
    """Rows of which most words weigh nothing, coins of 1/64 each."""
    rows = (requests, shape[2], vocab)
    tokens, *tree = walk_args(shape, requests, damaged)
    target, draft = (torch.randint(0, 16, rows, dtype=torch.int32).float() / 64 for _ in "pq")
    target *= torch.rand(rows) < min(0.7, 60 / vocab)
    drafted = torch.tensor([32, 16, 8, 0])[:vocab]
    target[:, :, :4] = torch.randint(0, 2, (*rows[:2], len(drafted))) * drafted / 64
    draft[::2] = 0
    coins = torch.randint(0, 64, (requests, shape[2] + 1)) / 64
    if damaged:
        tokens[:, ::2] += torch.arange(-1, requests - 1)[:, None] * vocab
        target.view(-1)[:: 3 * vocab + 1] = math.nan
        target.view(-1)[:: 5 * vocab + 2] = math.inf
        target[1] = 0
        coins[-3:, -1] = torch.tensor([-0.5, 1.0, math.nan])
    return tokens, *tree, coins[:, :-1], coins[:, -1], target, draft, 1.0, 1.0


def results(requests, width, columns):
    return (
        torch.full((requests * width,), -7, dtype=torch.int32),
        torch.full((requests, columns), 99, dtype=torch.int32),
        torch.full((requests,), 99, dtype=torch.int32),
    )


def on_gpu(args):
    return [arg.cuda() if isinstance(arg, torch.Tensor) else arg for arg in args]


def assert_same_results(op, columns, args):
    out = results(*args[0].shape, columns)
    gpu_out = on_gpu(out)
    op(*out, *args)
    op(*gpu_out, *on_gpu(args))
    for ours, theirs in zip(gpu_out, out, strict=True):
        assert torch.equal(ours.cpu(), theirs)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("damaged", [False, True])
@pytest.mark.parametrize("requests", [0, 1, 33])
def test_build_tree(shape, damaged, requests):
    args = tree_args(*shape, requests, damaged)
    for got, want in zip(build_tree(*on_gpu(args)), build_tree(*args), strict=True):
        assert got.is_cuda
        assert torch.equal(got.cpu(), want)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("damaged", [False, True])
@pytest.mark.parametrize("requests", [0, 1, 33])
def test_verify_tree_greedy(shape, damaged, requests):
    for columns, dtype in ((1, torch.int32), (shape[0] + 1, torch.int64), (9, torch.int32)):
        target = torch.randint(0, 4, (requests, shape[2]), dtype=dtype)
        args = (*walk_args(shape, requests, damaged), target)
        assert_same_results(verify_tree_greedy, columns, args)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("vocab", [1, 3, 40, 4097])
@pytest.mark.parametrize("damaged", [False, True])
def test_tree_sampling(shape, vocab, damaged):
    for columns in (1, shape[0] + 1, 9):
        args = sampling_args(shape, 7, vocab, damaged)
        assert_same_results(tree_speculative_sampling_target_only, columns, args)
        assert_same_results(tree_speculative_sampling_target_only, columns, args[:-3])


@pytest.mark.parametrize("requests", [0, 9])
@pytest.mark.parametrize("vocab", [128_256, 151_937])
def test_tree_sampling_of_a_large_vocabulary(requests, vocab):
    args = sampling_args((3, 2, 6), max(requests, 2), vocab)
    args = [arg[:requests] if isinstance(arg, torch.Tensor) else arg for arg in args]
    assert_same_results(tree_speculative_sampling_target_only, 4, args)


def test_captured_once_and_replayed_on_other_trees():
    shape, requests, vocab = (4, 3, 17), 5, 300
    tree, later = (on_gpu(tree_args(*shape, requests)) for _ in "ab")
    coins = torch.randint(0, 64, (requests, 18)).cuda() / 64
    target = torch.randint(0, 3, (requests, 17)).cuda()
    probs = torch.randint(0, 16, (requests, 17, vocab)).cuda() / 64
    greedy, sampled = (on_gpu(results(requests, 17, 5)) for _ in "ab")

    def step(args):
        _, _, ids, *links, tokens = build_tree(*args)
        walked = (tokens.view(ids.shape), ids, *links)
        verify_tree_greedy(*greedy, *walked, target)
        tree_speculative_sampling_target_only(
            *sampled, *walked, coins[:, :17], coins[:, 17], probs, probs * 0, 1.0, 1.0
        )

    step(tree)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(tree)
    for held, new in zip(tree[:5], later[:5], strict=True):
        held.copy_(new)
    for out in (*greedy, *sampled):
        out.fill_(-9)
    graph.replay()
    replayed = [out.clone() for out in (*greedy, *sampled)]
    for out in (*greedy, *sampled):
        out.fill_(-9)
    step(later)
    assert all(torch.equal(*pair) for pair in zip(replayed, (*greedy, *sampled), strict=True))


def p_values(links, drafts, *, requests=200_000, same_coin=False):
    """Of the first token, then of the second given each first; after a token comes its own row."""
    width = len(links[0])
    rows = torch.rand(VOCAB, VOCAB).cuda()
    rows[[ROOT, 1], 3] = 0
    rows /= rows.sum(1, keepdim=True)
    tokens = torch.tensor([ROOT, *drafts]).cuda().repeat(requests, 1)
    coins = torch.rand(requests, width + 1).cuda()
    if same_coin:
        coins[:] = coins[:, :1]
    predicts, accept_index, num = on_gpu(results(requests, width, 4))
    target = rows[tokens]
    tree_speculative_sampling_target_only(
        predicts, accept_index, num, tokens,
        torch.arange(requests * width).view(requests, width).cuda(),
        *(torch.tensor(part).cuda().repeat(requests, 1) for part in links),
        coins[:, :width], coins[:, width], target, target * 0, 1.0, 1.0,
    )  # fmt: skip
    first = predicts.view(requests, width)[:, 0]
    yield p_value(first, rows[ROOT])
    for token in first[num > 0].unique():
        after = predicts[accept_index[(first == token) & (num > 0), 1]]
        yield p_value(after, rows[token])


def p_value(tokens, row):
    """Pearson's chi-square; 0 if a token came that cannot."""
    counts = tokens.bincount(minlength=VOCAB).double()
    expected = row.double() * counts.sum()
    comes = row > 0
    if counts[~comes].any():
        return 0.0
    statistic = ((counts - expected)[comes] ** 2 / expected[comes]).sum().cpu()
    return float(torch.special.gammaincc((comes.sum().cpu() - 1) / 2, statistic / 2))


@pytest.mark.parametrize(
    ("links", "drafts"),
    [(CHAIN, [1, 2, 0]), (TREE, [1, 2, 0, 0, 2, 4, 1]), (TREE, [1, 1, 2, 4, 0, 4, 0])],
    ids=["chain", "tree", "equal siblings"],
)
def test_sampling_follows_the_target(links, drafts):
    assert min(p_values(links, drafts)) > 1e-3
    assert min(p_values(links, drafts, same_coin=True)) < 1e-6
