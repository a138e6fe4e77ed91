"""tree_speculative_sampling_target_only's torch reference on trees by hand.

Probabilities and coins are multiples of 1/64, so that no sum rounds.
"""

from __future__ import annotations

import math

import pytest
import torch

from graphkit.ops.tree_sampling import tree_speculative_sampling_target_only

UNTOUCHED = -7
NAN, INF = math.nan, math.inf
ALONE = [-1], [-1]
PAIR = [1, -1, -1], [-1, 2, -1]
CHAIN = [1, 2, -1], [-1, -1, -1]


def sample(links, tokens, coins, final, target, *, draft=None, columns=3, single=1.0, acc=1.0):
    """(token after each accepted node, accepted nodes) of one request."""
    width = len(tokens)
    out = (
        torch.full((width,), UNTOUCHED, dtype=torch.int32),
        torch.full((1, columns), 99, dtype=torch.int32),
        torch.full((1,), 99, dtype=torch.int32),
    )
    target = torch.tensor([target])
    draft = None if draft is None else torch.tensor([draft])
    tree_speculative_sampling_target_only(
        *out, torch.tensor([tokens]), torch.arange(width)[None],
        *(torch.tensor([part]) for part in links), torch.tensor([coins]), torch.tensor([final]),
        target, draft, single, acc,
    )  # fmt: skip
    predicts, (accept_index,), num = out
    path = accept_index[: int(num) + 1].tolist()
    assert accept_index[len(path) :].eq(-1).all()
    assert [node for node in range(width) if predicts[node] != UNTOUCHED] == sorted(path)
    return predicts[path].tolist(), path


@pytest.mark.parametrize(
    ("coin", "final", "after", "path"),
    [
        (0.0, 0.0, [1, 0], [0, 1]),  # [0, 0.25) is the first child's
        (0.125, 0.5, [1, 1], [0, 1]),
        (0.25, 0.0, [2, 3], [0, 2]),  # [0.25, 0.75) is the second's
        (0.625, 0.0, [2, 3], [0, 2]),
        (0.75, 0.0, [0], [0]),  # the rest is 0's and 3's, one to one
        (0.75, 0.375, [0], [0]),
        (0.75, 0.5, [3], [0]),
        (0.875, 0.875, [3], [0]),
    ],
)
def test_a_coin_divides_among_siblings(coin, final, after, path):
    target = [[0.125, 0.25, 0.5, 0.125], [0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0]]
    assert sample(PAIR, [9, 1, 2], [coin, 0.0, 0.0], final, target) == (after, path)


@pytest.mark.parametrize(
    ("coins", "after", "path"),
    [
        ([0.0, 0.0, 0.0], [1, 0, 1], [0, 1, 2]),
        ([0.0, 0.5, 0.0], [1, 1], [0, 1]),
        ([0.5, 0.0, 0.0], [0], [0]),
    ],
)
def test_each_node_has_a_coin_of_its_own(coins, after, path):
    assert sample(CHAIN, [9, 1, 0], coins, 0.5, [[0.5, 0.5]] * 3) == (after, path)


def test_no_column_left_draws_from_the_whole_row():
    target = [[0.5, 0.5], [0.5, 0.5], [0.5, 0.5]]
    assert sample(CHAIN, [9, 1, 1], [0.0] * 3, 0.75, target, columns=2) == ([1, 1], [0, 1])
    assert sample(CHAIN, [9, 1, 1], [0.0] * 3, 0.0, target, columns=1) == ([0], [0])


def test_an_equal_sibling_adds_nothing():
    target = [[0.5, 0.25, 0.25]] * 3
    assert sample(PAIR, [9, 1, 1], [0.375, 0.0, 0.0], 0.0, target) == ([0], [0])


def test_a_token_of_no_mass_is_never_accepted_nor_drawn():
    target = [[0.0, 0.5, 0.0, 0.5, 0.0]] * 3
    for final in (0.0, 0.499, 0.5, 1 - 2**-24, 1.0, NAN, -0.5):  # the last three are no coins
        after, path = sample(PAIR, [9, 0, 2], [0.0, 0.0, 0.0], final, target, single=0.0, acc=0.0)
        assert after in ([1], [3])
        assert path == [0]


def test_thresholds_accept_more():
    target = [[0.5, 0.25, 0.25]] * 3
    drafted = {"links": PAIR, "tokens": [9, 1, 2], "final": 0.0, "target": target}
    assert sample(coins=[0.5, 0, 0], **drafted)[1] == [0]
    assert sample(coins=[0.5, 0, 0], acc=0.75, **drafted)[1] == [0, 2]
    assert sample(coins=[0.5, 0, 0], single=0.25, **drafted)[1] == [0, 1]
    assert sample(coins=[0.5, 0, 0], acc=0.5, single=0.26, **drafted)[1] == [0, 2]


def test_draft_probs_leave_the_residual():
    target, draft = [[0.5, 0.25, 0.25]], [[0.25, 0.5, 0.0]]  # leaves 0.25, 0, 0.25
    drawn = [sample(ALONE, [9], [0.0], coin / 8, target, draft=draft)[0] for coin in range(8)]
    assert drawn == [[0]] * 4 + [[2]] * 4


@pytest.mark.parametrize(
    ("row", "token"),
    [
        ([0.0, 0.0, 0.0], 0),
        ([0.25, 0.5, 0.25], 1),
        ([NAN, 0.25, 0.5], 2),
        ([NAN, NAN, NAN], 0),
        ([0.5, INF, 0.25], 1),
        ([-1.0, -2.0, -0.5], 2),
    ],
)
def test_no_finite_total_takes_the_most_probable(row, token):
    assert sample(ALONE, [9], [0.0], 0.99, [row], draft=[[1.0, 1.0, 1.0]])[0] == [token]


def test_drafts_that_hold_all_mass_but_are_refused_by_rounding():
    target = [[0.0, 0.5, 0.5 - 2**-24]] * 3  # sums to less than 1
    after, path = sample(PAIR, [9, 2, 1], [1 - 2**-24, 0.0, 0.0], 0.5, target)
    assert (after, path) == ([1], [0])
