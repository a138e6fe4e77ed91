"""Draft trees: their size, links and depths.

Dimensions: B requests, W nodes of each, K topk, S num_steps, P parents, 1 + (S - 1) * K, F forwards
of a chain after the first.
"""

# ruff: noqa: N806 - suffixes of tensor names are dimensions
from __future__ import annotations

from typing import Annotated, Any

import torch

from graphkit.errors import ConfigError, InputError
from graphkit.ops.argument_rules import describe
from graphkit.ops.registration import register_op

TreeTensors = tuple[
    Annotated[torch.Tensor, "[B, W, W] bool"],
    Annotated[torch.Tensor, "[B * W] int64"],
    Annotated[torch.Tensor, "[B, W] int64"],
    Annotated[torch.Tensor, "[B, W] int64"],
    Annotated[torch.Tensor, "[B, W] int64"],
    Annotated[torch.Tensor, "[B * W] int64"],
]
"""The results of ``build_tree``."""


def num_candidates(num_steps: int, topk: int) -> int:
    """Return the number of tokens that S steps of K branches propose: K, then K * K per step."""
    return topk + (num_steps - 1) * topk * topk if num_steps else 0


def _check_parents(args: Any) -> None:
    """Refuse a parent list of the wrong length; one step has no parents but the root."""
    expected = args.topk * (args.num_steps - 1) + 1
    parents = args.parent_list.shape[1]
    if parents != expected and (parents or args.num_steps > 1):
        raise InputError(
            f"build_tree: parent_list is {describe(args.parent_list)}, expected "
            f"[B, K * (S - 1) + 1] = {[args.parent_list.shape[0], expected]}.",
            field="parent_list",
        )


@register_op(check=_check_parents, number_error=ConfigError)
def build_tree(
    bonus_tokens: Annotated[torch.Tensor, "[B] int64"],
    parent_list: Annotated[torch.Tensor, "[B, P] int64"],
    top_scores_index: Annotated[torch.Tensor, "[B, W - 1] int64"],
    draft_tokens: Annotated[torch.Tensor, "[B, W - 1] int64"],
    seq_lens: Annotated[torch.Tensor, "[B] int32 or int64"],
    num_steps: Annotated[int, "S >= 0"],
    topk: Annotated[int, "K >= 1"],
    num_draft_tokens: Annotated[int, "1 <= W <= max(1, 1 + K + (S - 1) * K * K)"],
) -> TreeTensors:
    """Link the selected candidates of each request to a tree under its bonus token.

    A request's candidates are numbered: the K tokens of draft step 0, then K * K of each further
    step, K under each of the K branches kept. The parent of candidate c is candidate
    ``parent_list[c // K]``, or the root if ``c // K`` is 0. The W - 1 selected candidates become
    nodes 1 to W - 1 in ascending order. Node 0 is the root and holds the bonus token.

    The links agree with SGLang's ``build_tree_kernel_efficient`` (sgl-kernel, eagle_utils.cu).
    To visit the children of node i of request b, start at ``retrieve_next_token[b, i]`` and follow
    ``retrieve_next_sibling[b, child]`` until it is -1. Both hold node numbers within the request;
    ``retrieve_index[b, i]`` is the node's row in flat tensors such as the target's logits.

    A node whose parent was not selected, or whose indices are out of range because scores were
    NaN, becomes a child of the root. A parent always has a smaller number than its children, so
    the result is a tree for any input.

    Args:
        bonus_tokens: Token at the root of each tree.
        parent_list: Candidate at the end of each kept branch; entry 0 is the root. P is K * (S - 1)
            + 1; also 0 if S <= 1.
        top_scores_index: Numbers of the selected candidates, ascending along each row.
        draft_tokens: Tokens of the selected candidates.
        seq_lens: Committed tokens without the bonus token, which is the bonus token's position.
        num_steps: Draft steps (S).
        topk: Branches kept per step (K).
        num_draft_tokens: Nodes per tree, the root included (W).

    Returns:
        A tuple of six tensors:

        tree_mask: [B, W, W] bool. True where node i attends to node j, which is i itself or an
        ancestor. The committed prefix has no columns.
        positions: [B * W] int64. seq_lens + depth of each node.
        retrieve_index: [B, W] int64. Flat row of each node, b * W + i.
        retrieve_next_token: [B, W] int64. First child of each node, -1 if it has none.
        retrieve_next_sibling: [B, W] int64. Next child of the same parent, ascending, -1 if there
        is none.
        draft_tokens: [B * W] int64. Token of each node, the bonus token first.
    """
    requests, width = bonus_tokens.shape[0], num_draft_tokens
    parent_BW = _parents(parent_list, top_scores_index, num_candidates(num_steps, topk), topk)
    node_W = torch.arange(width, device=parent_BW.device)

    tree_mask = torch.eye(width, dtype=torch.bool, device=node_W.device).repeat(requests, 1, 1)
    for node in range(1, width):  # ascending: a parent's row is complete before a child copies it
        parent_B1W = parent_BW[:, node, None, None].expand(-1, 1, width)
        tree_mask[:, node] |= tree_mask.gather(1, parent_B1W)[:, 0]

    is_child_BWW = parent_BW[:, None, :] == node_W[:, None]
    is_later_BWW = (parent_BW[:, None, :] == parent_BW[:, :, None]) & (node_W > node_W[:, None])
    return (
        tree_mask,
        (seq_lens.long()[:, None] + tree_mask.sum(2) - 1).flatten(),
        torch.arange(requests * width, device=node_W.device).view(requests, width),
        _first(is_child_BWW),
        _first(is_later_BWW),
        torch.cat([bonus_tokens[:, None], draft_tokens], 1).flatten(),
    )


def _parents(
    parent_list: torch.Tensor, top_scores_index: torch.Tensor, candidates: int, topk: int
) -> torch.Tensor:
    """Return the parent of each node, int64 [B, W]; -1 for the root."""
    root_B1 = top_scores_index.new_full((top_scores_index.shape[0], 1), -1)
    candidate_BW = torch.cat([root_B1, top_scores_index], 1)
    parents_BP = torch.cat([root_B1, parent_list[:, 1:]], 1)

    branch_BW = candidate_BW // topk
    is_branch_BW = (branch_BW >= 0) & (branch_BW < parents_BP.shape[1])
    wanted_BW = parents_BP.gather(1, torch.where(is_branch_BW, branch_BW, 0))
    wanted_BW = torch.where((wanted_BW >= 0) & (wanted_BW < candidates), wanted_BW, -1)

    is_wanted_BWW = (wanted_BW[:, :, None] == candidate_BW[:, None, :]).tril(-1)
    parent_BW = _first(is_wanted_BWW)
    parent_BW[:, 1:].clamp_(min=0)
    return parent_BW


def _first(is_match: torch.Tensor) -> torch.Tensor:
    """Return the index of the first match along the last dimension, -1 if there is none."""
    return torch.where(is_match.any(-1), is_match.int().argmax(-1), -1)


@register_op()
def chain_candidates(
    first_tokens: Annotated[torch.Tensor, "[B, 1] int64"],
    later_tokens: Annotated[torch.Tensor, "[F, B] int64"],
    num_draft_tokens: Annotated[int, "1 <= W <= F + 2"],
) -> tuple[
    Annotated[torch.Tensor, "[B, F + 1] int64"],
    Annotated[torch.Tensor, "[B, W - 1] int64"],
    Annotated[torch.Tensor, "[B, W - 1] int64"],
]:
    """Return the first W - 1 tokens of each chain in the form that ``build_tree`` reads.

    Args:
        first_tokens: Token of step 0.
        later_tokens: Tokens of the further steps, S - 1 = F.
        num_draft_tokens: Nodes per chain, the root included (W).

    Returns:
        ``parent_list`` [B, S], ``top_scores_index`` [B, W - 1] and ``draft_tokens`` [B, W - 1], all
        int64. Candidate s is the token of step s, and its parent is candidate s - 1.
    """
    tokens = torch.cat([first_tokens, later_tokens.t()], 1)
    parents = torch.arange(-1, tokens.shape[1] - 1, device=tokens.device)
    numbers = torch.arange(num_draft_tokens - 1, device=tokens.device)
    return (
        parents.repeat(len(tokens), 1),
        numbers.repeat(len(tokens), 1),
        tokens[:, : num_draft_tokens - 1].contiguous(),
    )


def parents_and_depths(tree_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the parent of each node, -1 for roots, and how many nodes it sees.

    Nodes may be in any order. The parent of a node is the deepest of its ancestors, each of which
    sees fewer nodes. If all nodes see all, as in the mask of a pad row, all are roots. Enqueues
    only; may be captured.

    Shapes:
        tree_mask: [B, W, W] bool; True where node i sees node j, which is i itself or an ancestor.
        Returns two of [B, W] int64.
    """
    depths = tree_mask.sum(2)
    is_ancestor = tree_mask & (depths[:, None] < depths[:, :, None])
    deepest = torch.where(is_ancestor, depths[:, None], -1).max(2)
    return torch.where(deepest.values < 0, -1, deepest.indices), depths
