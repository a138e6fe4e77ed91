"""Links and mask of a draft tree must describe one tree."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine_runs import refuses
from graphkit.engine import DraftTree, EagleDrafter, SamplingParams
from graphkit.engine.step.tree_checks import check_links, check_probs
from graphkit.errors import InputError

WIDTH = 5
PARENTS = [-1, 0, 0, 1, 3]
"""A root with children 1 and 2, and a path 1, 3, 4."""
ALTERED = (
    ("tree_mask", (1, 3, 1), False, "path [0, 1, 3], but tree_mask[1, 3] shows [0, 3]"),
    ("tree_mask", (1, 2, 1), True, "path [0, 2], but tree_mask[1, 2] shows [0, 1, 2]"),
    ("tree_mask", (0, 0, 0), False, "path [0], but tree_mask[0, 0] shows []"),
    ("retrieve_next_token", (1, 2), 4, "request 1 contains node 4, which is linked twice"),
    ("retrieve_next_token", (0, 4), 0, "request 0 contains node 0, which is linked twice"),
    ("retrieve_next_sibling", (0, 1), 1, "request 0 contains node 1, which is linked twice"),
    ("retrieve_next_sibling", (0, 2), WIDTH, "contains node 5, which does not exist"),
    ("retrieve_next_token", (1, 4), -2, "contains node -2, which does not exist"),
)
"""Tensor of the tree, index in it, another value, and part of the error."""


def tree_of(parents, batch_size=2):
    """Return trees of the given parents, with links and masks that agree."""
    width = len(parents)
    child, sibling = [-1] * width, [-1] * width
    mask = torch.eye(width, dtype=torch.bool)
    for node in range(1, width):
        older = [other for other in range(1, node) if parents[other] == parents[node]]
        (sibling if older else child)[older[-1] if older else parents[node]] = node
        mask[node] |= mask[parents[node]]
    repeated = torch.tensor([child, sibling]).repeat(batch_size, 1, 1).unbind(1)
    return DraftTree(
        draft_tokens=torch.zeros(batch_size * width, dtype=torch.int64),
        tree_mask=mask.repeat(batch_size, 1, 1),
        retrieve_next_token=repeated[0].contiguous(),
        retrieve_next_sibling=repeated[1].contiguous(),
    )


@pytest.mark.parametrize("parents", [[-1], [-1, 0, 1], [-1, 0, 0, 0], PARENTS, [-1, 0, 0, 2, 1]])
def test_links_and_a_mask_of_one_tree(parents):
    check_links("draft", tree_of(parents), is_chain=False)


@pytest.mark.parametrize(("field", "index", "value", "text"), ALTERED)
def test_one_wrong_value_is_refused(field, index, value, text):
    tree = tree_of(PARENTS)
    getattr(tree, field)[index] = value
    with pytest.raises(InputError) as caught:
        check_links("draft", tree, is_chain=False)
    assert str(caught.value).startswith("draft: ")
    assert text in str(caught.value)
    assert caught.value.field == field


def test_a_node_that_the_links_do_not_reach_is_not_checked():
    tree = tree_of(PARENTS)
    tree.retrieve_next_token[:, 3] = -1  # node 4 is the end of no path
    tree.tree_mask[:, 4] = False
    check_links("draft", tree, is_chain=False)


def test_a_chain_needs_the_links_of_one_and_no_mask():
    chain = replace(tree_of([-1, 0, 1]), tree_mask=None)
    check_links("draft", chain, is_chain=True)
    with refuses(
        InputError, "retrieve_next_token", r"path \[0, 2\], but the chain has \[0, 1, 2\]"
    ):
        check_links("draft", tree_of([-1, 0, 0]), is_chain=True)


@pytest.mark.parametrize(
    ("row", "wrong"),
    [(0, [0.5, 0.4, 0.0]), (8, [1.5, -0.5, 0.0]), (5, [0.0, float("nan"), 1.0]), (1, [0.0] * 3)],
)
def test_probabilities_of_drafts_that_are_no_distribution(row, wrong):
    """Nodes 0, 1 and 3 of each request have children."""
    tree = tree_of(PARENTS)
    probs = torch.tensor([0.25, 0.75, 0.0]).repeat(10, 1)
    probs[[2, 4, 7, 9]] = float("nan")
    check_probs("draft", tree, probs)
    probs[row] = torch.tensor(wrong)
    with refuses(InputError, "draft_probs", rf"^draft: draft_probs\[{row}\] has a sum of"):
        check_probs("draft", tree, probs)


@pytest.mark.parametrize(
    ("columns", "text"), [(95, r"expected \[B \* W, V\] = \[4, 96\]"), (96, "has a sum of 96 or")]
)
def test_probabilities_of_a_drafter_are_checked(make_engine, task, monkeypatch, columns, text):
    monkeypatch.setenv("GRAPHKIT_CHECK", "1")

    class NotNormalised(EagleDrafter):
        def draft(self, req_pool_indices, seq_lens, bonus_tokens):
            tree = super().draft(req_pool_indices, seq_lens, bonus_tokens)
            ones = tree.draft_tokens.new_ones(len(tree.draft_tokens), columns)
            return replace(tree, draft_probs=ones.float())

    with refuses(InputError, "draft_probs", rf"NotNormalised\.draft: draft_probs.* {text}"):
        make_engine(drafter=NotNormalised).generate(task.prompts[:1])


@pytest.mark.parametrize("algorithm", ["EAGLE", "MULTI_LAYER_EAGLE", "NGRAM"])
@pytest.mark.parametrize("topk", [1, 2], ids=["chain", "tree"])
def test_the_trees_of_the_drafters_pass(make_engine, task, monkeypatch, algorithm, topk):
    monkeypatch.setenv("GRAPHKIT_CHECK", "1")
    engine = make_engine(algorithm, topk=topk)
    (request,) = engine.generate(task.prompts[:1], SamplingParams(max_new_tokens=6))
    assert len(request.output_ids) == 6


class SeesItsSiblings(EagleDrafter):
    def draft(self, req_pool_indices, seq_lens, bonus_tokens):
        tree = super().draft(req_pool_indices, seq_lens, bonus_tokens)
        return replace(tree, tree_mask=torch.ones_like(tree.tree_mask).tril())


@pytest.mark.parametrize("is_checking", [False, True])
def test_a_contradiction_is_refused_where_the_host_sees_it_or_checks(
    make_engine, task, monkeypatch, device, is_checking
):
    monkeypatch.setenv("GRAPHKIT_CHECK", str(int(is_checking)))
    engine = make_engine(topk=2, drafter=SeesItsSiblings)
    if device == "cuda" and not is_checking:
        engine.generate(task.prompts[:1], SamplingParams(max_new_tokens=4))
        return
    with pytest.raises(InputError, match=r"SeesItsSiblings\.draft: the links of request 0 put"):
        engine.generate(task.prompts[:1], SamplingParams(max_new_tokens=4))
