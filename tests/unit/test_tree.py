"""Growing a draft tree: candidates, scores, parents and the choice, against a tree by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, strategies as st

from graphkit.ops import build_tree
from graphkit.ops.logits import top_candidates
from graphkit.runners.draft import TreeGrowth

FLAT = [0.25, 0.5, 1.0, 0.0]
"""Probabilities that make products tie, and nothing of others."""


def grow(probabilities, tokens):
    """A ``TreeGrowth`` of [B, K] and then [B, K, K] of each further step."""
    growth = TreeGrowth(probabilities[0], tokens[0], len(tokens))
    for p, token in zip(probabilities[1:], tokens[1:], strict=True):
        growth.grow(p.flatten(0, 1), token.flatten(0, 1))
    return growth


def steps_of(requests, topk, num_steps, make):
    """``make(shape)`` for step 0, then for each further one."""
    return [make((requests, topk))] + [make((requests, topk, topk)) for _ in range(1, num_steps)]


@pytest.fixture(scope="session")
def by_hand(grow_by_hand):
    """The tree of one request of what ``grow`` is given."""

    def make(probabilities, tokens, request):
        def pairs(step, place):
            rows = (part[step][request][place].tolist() for part in (probabilities, tokens))
            return list(zip(*rows, strict=True))

        def propose(branch):
            return pairs(len(branch.path), branch.place)

        return grow_by_hand(pairs(0, slice(None)), propose, num_steps=len(tokens))

    return make


def assert_as_by_hand(probabilities, tokens, width, by_hand):
    growth, requests = grow(probabilities, tokens), len(tokens[0])
    topk, num_steps = tokens[0].shape[1], len(tokens)
    got = dict(
        zip(("parent_list", "top_scores_index", "draft_tokens"), growth.best(width), strict=True)
    )
    tree_mask, *_ = build_tree(
        torch.zeros(requests, dtype=torch.int64), *got.values(),
        torch.zeros(requests, dtype=torch.int32), num_steps, topk, width,
    )  # fmt: skip
    for request in range(requests):
        tree = by_hand(probabilities, tokens, request)
        assert {name: rows[request].tolist() for name, rows in got.items()} == tree.output(width)
        sees = [set(row.nonzero().flatten().tolist()) for row in tree_mask[request]]
        assert sees == tree.sees(width)
        assert growth.tokens[request].tolist() == [each.token for each in tree.branches[-1]]
        if num_steps > 1:
            parents = [each.parent.place for each in tree.branches[-1]]
            assert growth.parents[request].tolist() == parents
    assert all(rows.dtype is torch.int64 for rows in got.values())


@pytest.mark.parametrize("num_steps", [1, 2, 3, 4])
@pytest.mark.parametrize("topk", [1, 2, 3, 4])
def test_any_probabilities(by_hand, num_steps, topk):
    torch.manual_seed(num_steps * 10 + topk)
    probabilities = steps_of(5, topk, num_steps, torch.rand)
    tokens = steps_of(5, topk, num_steps, lambda shape: torch.randint(0, 9, shape))
    most = 1 + topk + (num_steps - 1) * topk * topk
    for width in {1, 2, topk + 1, most // 2 + 1, most}:
        assert_as_by_hand(probabilities, tokens, width, by_hand)


@given(st.data())
def test_ties_leave_one_tree(by_hand, data):
    """Ties go to the smaller number, so that no node is chosen without its parent."""
    topk, num_steps = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    width = data.draw(st.integers(1, 1 + topk + (num_steps - 1) * topk * topk))
    chance = st.sampled_from(data.draw(st.sampled_from([FLAT, FLAT[2:], FLAT[2:3], FLAT[3:]])))

    def make(shape):
        count = math.prod(shape)
        return torch.tensor(data.draw(st.lists(chance, min_size=count, max_size=count))).view(shape)

    probabilities = steps_of(2, topk, num_steps, make)
    tokens = steps_of(2, topk, num_steps, lambda shape: torch.arange(math.prod(shape)).view(shape))
    assert_as_by_hand(probabilities, tokens, width, by_hand)


def test_scores_that_vanish_leave_one_tree(by_hand):
    probabilities = steps_of(2, 3, 4, lambda shape: torch.full(shape, 1e-20))
    tokens = steps_of(2, 3, 4, lambda shape: torch.arange(math.prod(shape)).view(shape))
    assert_as_by_hand(probabilities, tokens, 12, by_hand)


def test_no_requests():
    probabilities = steps_of(0, 2, 3, torch.rand)
    growth = grow(probabilities, [rows.long() for rows in probabilities])
    assert [tuple(rows.shape) for rows in growth.best(6)] == [(0, 5), (0, 5), (0, 5)]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_scores_that_are_no_numbers_keep_the_numbers_in_range(bad):
    probabilities = steps_of(2, 2, 3, torch.rand)
    probabilities[1][0] = bad
    tokens = steps_of(2, 2, 3, lambda shape: torch.arange(math.prod(shape)).view(shape))
    parent_list, top_scores_index, draft_tokens = grow(probabilities, tokens).best(6)
    assert top_scores_index.unique_consecutive(dim=1).shape == (2, 5)
    assert 0 <= top_scores_index.min() <= top_scores_index.max() < 10
    assert -1 <= parent_list.min() <= parent_list.max() < 10
    mask, *_ = build_tree(
        torch.zeros(2, dtype=torch.int64), parent_list, top_scores_index, draft_tokens,
        torch.zeros(2, dtype=torch.int32), 3, 2, 6,
    )  # fmt: skip
    assert mask.diagonal(dim1=1, dim2=2).all()
    assert mask[:, :, 0].all()


@pytest.mark.parametrize("topk", [1, 2, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_candidates_are_the_likeliest_of_the_softmax(topk, dtype):
    logits = torch.stack([torch.randperm(40) for _ in range(6)]).to(dtype) / 4 - 3
    p, index = top_candidates(logits, topk)
    softmax = logits.float().softmax(-1)
    assert (p.dtype, index.dtype) == (torch.float32, torch.int64)
    assert p.shape == index.shape == (6, topk)
    torch.testing.assert_close(p, softmax.gather(1, index), rtol=1e-6, atol=0)
    for row, chosen in zip(logits.tolist(), index.tolist(), strict=True):
        assert chosen == sorted(range(40), key=lambda token: -row[token])[:topk]


@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 3, 50]))
def test_no_probability_exceeds_one(seed, scale):
    """A child would rank before its parent."""
    logits = torch.randn(8, 7, generator=torch.Generator().manual_seed(seed)) * scale
    for topk in (1, 3):
        assert top_candidates(logits, topk)[0].max() <= 1


@pytest.mark.parametrize("vocab", [3, 10, 100, 1000])
def test_a_chain_takes_the_smaller_of_equal_tokens(vocab):
    flat = torch.zeros(2, vocab)
    assert top_candidates(flat, 1)[1].tolist() == [[0], [0]]
    flat[0, vocab // 2 :] = 1.0
    assert top_candidates(flat, 1)[1].tolist() == [[vocab // 2], [0]]


@pytest.mark.parametrize("topk", [2, 3])
def test_which_of_equal_tokens_does_not_depend_on_the_other_rows(topk):
    """Else replays would differ from eager."""
    rows = torch.zeros(9, 40)
    alone = top_candidates(rows[:1], topk)[1].tolist()
    assert top_candidates(rows, topk)[1].tolist() == alone * 9
