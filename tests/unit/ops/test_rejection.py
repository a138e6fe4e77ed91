"""Rejection sampling follows the target's distribution for drafts that are sampled: chi-square.

Target and drafter are Markov chains, as in ``test_tree_distribution.py``.
"""

from __future__ import annotations

import math
import runpy
from pathlib import Path

import pytest
import torch

from graphkit.ops.rejection import accept_by_rejection

HERE = runpy.run_path(str(Path(__file__).with_name("test_tree_distribution.py")))
REQUESTS, VOCAB, ROOT, LIKELY, UNLIKELY, p_value, target_rows = map(
    HERE.get, ("REQUESTS", "VOCAB", "ROOT", "LIKELY", "UNLIKELY", "p_value", "target_rows")
)
CHAIN = HERE["CHAIN"], {0: [1], 1: [2], 2: [3]}
TREE = HERE["TREE"], {0: [1, 2, 3], 1: [4, 5, 6], 2: [7]}
SHAPES = {"chain": CHAIN, "tree": TREE}
"""Links, and children by node."""


def draft_rows():
    """Row t: what the drafter draws from after token t. It never draws 1 after the root."""
    rows = torch.rand(VOCAB, VOCAB, generator=torch.Generator().manual_seed(5)) ** 2
    rows[ROOT, 1] = 0
    return rows / rows.sum(1, keepdim=True)


def accepted(shape, *, sorted_siblings=False, other_rows=False):
    """Tokens of each path, [requests, width], and accepted drafts."""
    torch.manual_seed(3)
    links, children = SHAPES[shape]
    width, rows = len(links[0]), draft_rows()
    tokens = torch.full((REQUESTS, width), ROOT)
    for parent, nodes in children.items():
        drawn = rows[tokens[:, parent]].multinomial(len(nodes))
        tokens[:, nodes] = drawn.sort(1).values if sorted_siblings else drawn
    each = torch.arange(REQUESTS)
    predict, _, drafts, _ = accept_by_rejection(
        tokens, *(torch.tensor(part).repeat(REQUESTS, 1) for part in links),
        target_rows()[tokens].flatten(0, 1),
        rows.roll(int(other_rows), 0)[tokens].flatten(0, 1),
        each, each, each.int(), 4,
    )  # fmt: skip
    return predict.view(REQUESTS, width), drafts


def p_values(shape, **broken):
    """Of the first token, then of the second given each first that has enough of them."""
    predict, drafts = accepted(shape, **broken)
    rows = target_rows()
    yield p_value(predict[:, 0], rows[ROOT])
    for token in range(VOCAB):
        after = predict[(predict[:, 0] == token) & (drafts > 0), 1]
        if after.numel() > 500:
            yield p_value(after, rows[token])


@pytest.mark.parametrize("shape", SHAPES)
def test_follows_the_target(shape):
    found = list(p_values(shape))
    assert min(found) > LIKELY
    assert len(found) > 3


@pytest.mark.parametrize(
    ("shape", "broken"),
    [("chain", "other_rows"), ("tree", "other_rows"), ("tree", "sorted_siblings")],
)
def test_drafts_that_were_drawn_otherwise_do_not(shape, broken):
    assert min(p_values(shape, **{broken: True})) < UNLIKELY


def test_a_chain_accepts_as_often_as_distributions_overlap():
    """No rule accepts more: the probability is the sum of min(p, q)."""
    _, drafts = accepted("chain")
    overlap = torch.minimum(target_rows()[ROOT], draft_rows()[ROOT]).sum().item()
    noise = math.sqrt(overlap * (1 - overlap) / REQUESTS)
    assert abs((drafts > 0).double().mean().item() - overlap) < 4 * noise


def test_siblings_accept_more_than_a_chain():
    chain, tree = ((accepted(shape)[1] > 0).double().mean() for shape in SHAPES)
    assert tree > chain + 0.04
