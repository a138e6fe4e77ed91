"""Tests of the number of accepted drafts, computed from a verify batch and its logits."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import graphkit as gk
from graphkit.audit.pads.findings import accepted_drafts
from graphkit.ops import build_tree, verify_tree_greedy

VOCAB, STEPS = 11, 3


def drafted(requests, topk, width, seed):
    """Return a draft tree over a small vocabulary, so that many drafts are accepted."""
    torch.manual_seed(seed)
    from graphkit.ops.logits import top_candidates
    from graphkit.runners.tree_growth import TreeGrowth

    tree = TreeGrowth(*top_candidates(torch.randn(requests, VOCAB), topk), STEPS)
    for _ in range(STEPS - 1):
        tree.grow(*top_candidates(torch.randn(requests * topk, VOCAB), topk))
    built = build_tree(
        torch.randint(VOCAB, (requests,)), *tree.best(width), torch.full((requests,), 9).int(),
        STEPS, topk, width,
    )  # fmt: skip
    return dict(
        zip(("mask", "positions", "flat", "child", "sibling", "tokens"), built, strict=True)
    )


@pytest.mark.parametrize(("topk", "width"), [(1, 4), (2, 8), (3, 10)])
def test_counts_equal_those_by_the_links_of_the_tree(topk, width):
    spec = gk.SpecConfig("EAGLE", STEPS, topk, width)
    every = []
    for seed in range(40):
        tree = drafted(5, topk, width, seed)
        preferred = torch.nn.functional.one_hot(tree["tokens"].roll(-1), VOCAB).float()
        logits = torch.rand(5 * width, VOCAB) + preferred * (torch.rand(5 * width, 1) > 0.5)
        predicts, count = torch.zeros(5 * width).int(), torch.zeros(5).int()
        verify_tree_greedy(
            predicts, torch.zeros(5, STEPS + 1).int(), count, tree["tokens"].view(5, width),
            tree["flat"], tree["child"], tree["sibling"], logits.argmax(-1).view(5, width),
        )  # fmt: skip
        batch = gk.TargetVerifyInputs(
            req_pool_indices=np.arange(5), input_ids=tree["tokens"].numpy(),
            custom_mask=None if topk == 1 else tree["mask"].numpy(),
        )  # fmt: skip
        assert accepted_drafts(spec, batch, logits).tolist() == count.tolist()
        assert accepted_drafts(spec, batch, logits[: 2 * width]).tolist() == count[:2].tolist()
        every += count.tolist()
    assert {*every} >= {0, 1, 2}


def test_batches_that_define_no_tree_have_no_count():
    chain, tree = gk.SpecConfig("EAGLE", 1, 1, 2), gk.SpecConfig("EAGLE", 2, 2, 4)
    facts = {"batch_size": 2, "custom_mask": None, "input_ids": np.zeros(8)}
    without_drafts = SimpleNamespace(num_tokens=2, **facts)
    assert accepted_drafts(chain, without_drafts, torch.zeros(2, 5)) is None
    without_mask = SimpleNamespace(num_tokens=8, **facts)
    assert accepted_drafts(tree, without_mask, torch.zeros(8, 5)) is None
