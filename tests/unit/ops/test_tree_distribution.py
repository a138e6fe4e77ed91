"""Sampled verification follows the target's distribution, for any drafts: chi-square tests.

The target is a Markov chain: the row after a node depends on the node's token alone. So the first
token that a request emits must follow the row of its root, and the second, given the first, the row
of the first.
"""

from __future__ import annotations

import pytest
import torch

from graphkit.ops.tree_sampling import tree_speculative_sampling_target_only
from op_devices import CPU, CUDA, by

REQUESTS, VOCAB, ROOT = 40_000, 6, 5
LIKELY, UNLIKELY = 1e-3, 1e-6
"""p-values: a rule that holds stays above the one, seeds being fixed; a broken one goes below the
other."""
CHAIN = [1, 2, 3, -1], [-1, -1, -1, -1]
TREE = [1, 4, 7, -1, -1, -1, -1, -1], [-1, 2, 3, -1, 5, 6, -1, -1]
CASES = {
    "chain": (CHAIN, [1, 2, 0]),
    "chain of words that never come": (CHAIN, [3, 1, 2]),
    "tree": (TREE, [1, 2, 0, 0, 2, 4, 1]),
    "tree with equal siblings": (TREE, [1, 1, 2, 4, 0, 4, 0]),
    "tree of equal siblings alone": (TREE, [2, 2, 2, 1, 1, 1, 1]),
    "random chains": (CHAIN, None),
    "random trees": (TREE, None),
}


def target_rows():
    """Row t: the distribution after token t. Token 3 never comes after the root or token 1."""
    rows = torch.rand(VOCAB, VOCAB, generator=torch.Generator().manual_seed(7))
    rows[[ROOT, 1], 3] = 0
    return rows / rows.sum(1, keepdim=True)


def drafted(drafts, width):
    """Tokens of each request's nodes. Not given, they are drawn, and not evenly: what an even draw
    does wrong at one word makes up for what it does wrong at another."""
    tokens = torch.full((REQUESTS, width), ROOT)
    if drafts is None:
        tokens[:, 1:] = (torch.rand(REQUESTS, width - 1) ** 3 * VOCAB).long()
    else:
        tokens[:, 1:] = torch.tensor(drafts)
    return tokens


def emitted(run, links, drafts, *, draft_factor=0.0, same_coin=False, final_of_root=False, acc=1.0):
    """First and second token of each request; a second one is -1 if it was not reached."""
    torch.manual_seed(3)
    width = len(links[0])
    tokens = drafted(drafts, width)
    target = target_rows()[tokens]
    coins, finals = torch.rand(REQUESTS, width), torch.rand(REQUESTS)
    if same_coin:
        coins[:] = coins[:, :1]
    if final_of_root:
        finals = coins[:, 0].clone()
    predicts = torch.full((REQUESTS * width,), -1, dtype=torch.int32)
    accept_index = torch.zeros(REQUESTS, 4, dtype=torch.int32)
    run(
        tree_speculative_sampling_target_only, predicts, accept_index,
        torch.zeros(REQUESTS, dtype=torch.int32), tokens,
        torch.arange(REQUESTS * width).view(REQUESTS, width),
        *(torch.tensor(part).repeat(REQUESTS, 1) for part in links),
        coins, finals, target, target * draft_factor, 1.0, acc,
    )  # fmt: skip
    second = torch.where(accept_index[:, 1] < 0, -1, predicts[accept_index[:, 1].clamp(min=0)])
    return predicts.view(REQUESTS, width)[:, 0].long(), second.long()


def p_value(tokens, row):
    """Pearson's chi-square; 0 if a token came that cannot."""
    counts = tokens.bincount(minlength=VOCAB).double()
    expected = row.double() * counts.sum()
    comes = row > 0
    if counts[~comes].any():
        return 0.0
    statistic = ((counts - expected)[comes] ** 2 / expected[comes]).sum()
    return float(torch.special.gammaincc((comes.sum() - 1) / 2, statistic / 2))


def p_values(run, links, drafts, **broken):
    """Of the first token, then of the second given each first that has enough of them."""
    first, second = emitted(run, links, drafts, **broken)
    rows = target_rows()
    yield p_value(first, rows[ROOT])
    for token in range(VOCAB):
        after = second[(first == token) & (second >= 0)]
        if after.numel() > 500:
            yield p_value(after, rows[token])


@by(CPU, CUDA)
@pytest.mark.parametrize("case", CASES)
def test_follows_the_target(run, case):
    values = list(p_values(run, *CASES[case]))
    assert min(values) > LIKELY
    assert len(values) > 1 or "never" in case


@by(CPU, CUDA)
@pytest.mark.parametrize("case", ["chain", "tree", "tree with equal siblings", "random trees"])
@pytest.mark.parametrize(
    "broken",
    [
        {"acc": 0.8},  # accepts too much
        {"same_coin": True},  # the second choice repeats the first
        {"final_of_root": True},  # the last draw knows that the coin was high
        {"draft_factor": -1.0},  # refused tokens take part in the last draw
    ],
    ids=lambda broken: next(iter(broken)),
)
def test_a_broken_rule_does_not(run, case, broken):
    links, drafts = CASES[case]
    assert min(p_values(run, links, drafts, **broken)) < UNLIKELY
