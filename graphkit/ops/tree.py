"""The draft tree of each request: who hangs on whom, in the forms that the verify step reads.

Suffixes: B requests, W nodes per request.
"""

# ruff: noqa: N806 - tensor suffixes are the house's notation
# ruff: noqa: ARG001 - a fake kernel has its op's signature
from __future__ import annotations

import math

import torch

from graphkit.ops.tree_arguments import demand_between, demand_tensor
from graphkit.ops.tree_shape import Six, empty_tree, num_candidates


@torch.library.custom_op("graphkit::build_tree", mutates_args=(), device_types="cpu")
def build_tree(
    bonus_tokens: torch.Tensor,
    parent_list: torch.Tensor,
    top_scores_index: torch.Tensor,
    draft_tokens: torch.Tensor,
    seq_lens: torch.Tensor,
    num_steps: int,
    topk: int,
    num_draft_tokens: int,
) -> Six:
    """Link the selected candidates of each request to a tree under its bonus token.

    A request's candidates are the K tokens of draft step 0, then K * K of each further step, K
    under each of the K branches kept. Candidate c hangs on candidate ``parent_list[c // K]``, or
    on the root if ``c // K`` is 0. The W - 1 selected ones become nodes 1 to W - 1 in ascending
    order; node 0 is the bonus token, the root. Layout of the field's tree-building kernel.

    A node whose parent was not selected, or whose indices are out of range (scores that were NaN),
    hangs on the root. A parent always has a smaller number than its children, so whatever comes,
    the result is a tree.

    One launch on the current stream, none for an idle batch; never synchronises, may be captured.

    Args:
        bonus_tokens: The token that roots each tree.
        parent_list: Candidate that each kept branch ends in; entry 0 stands for the root.
        top_scores_index: Candidates selected, ascending along each row.
        draft_tokens: Their tokens.
        seq_lens: Committed tokens, the bonus token excluded: its position.
        num_steps: Draft steps (S).
        topk: Branches kept per step (K).
        num_draft_tokens: Nodes per tree, the root included (W).

    Returns:
        tree_mask: Whether node i sees node j, which is itself or an ancestor; the committed prefix
        is not part of it.
        positions: seq_lens + depth of each node.
        retrieve_index: Flat row of each node, b * W + i.
        retrieve_next_token: First child of each node, -1 if none.
        retrieve_next_sibling: Next child of the same parent, ascending, -1 if none.
        draft_tokens: The token of each node, the bonus token first.

    Shapes:
        bonus_tokens: [B] int64. parent_list: [B, K * (S - 1) + 1] int64; [B, 0] too if S <= 1.
        top_scores_index, draft_tokens: [B, W - 1] int64. seq_lens: [B] int32 or int64.
        Returns [B, W, W] bool, [B * W] int64, three of [B, W] int64, [B * W] int64.

    Raises:
        InputError: A tensor's shape, dtype or device does not fit.
        ConfigError: S steps of K branches cannot fill W nodes.
    """
    _check(bonus_tokens, parent_list, top_scores_index, draft_tokens, seq_lens,
           num_steps, topk, num_draft_tokens)  # fmt: skip
    requests, width = bonus_tokens.shape[0], num_draft_tokens
    parent_BW = _parents(parent_list, top_scores_index, num_candidates(num_steps, topk), topk)
    node_W = torch.arange(width, device=parent_BW.device)

    tree_mask = torch.eye(width, dtype=torch.bool, device=node_W.device).repeat(requests, 1, 1)
    for node in range(1, width):  # ascending: a parent's row is whole before its children copy it
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


@build_tree.register_fake
def _(
    bonus_tokens: torch.Tensor,
    parent_list: torch.Tensor,
    top_scores_index: torch.Tensor,
    draft_tokens: torch.Tensor,
    seq_lens: torch.Tensor,
    num_steps: int,
    topk: int,
    num_draft_tokens: int,
) -> Six:
    return empty_tree(bonus_tokens, num_draft_tokens)


@build_tree.register_kernel("cuda")
def _(
    bonus_tokens: torch.Tensor,
    parent_list: torch.Tensor,
    top_scores_index: torch.Tensor,
    draft_tokens: torch.Tensor,
    seq_lens: torch.Tensor,
    num_steps: int,
    topk: int,
    num_draft_tokens: int,
) -> Six:
    from graphkit.ops.kernels.tree import launch_build_tree

    _check(bonus_tokens, parent_list, top_scores_index, draft_tokens, seq_lens,
           num_steps, topk, num_draft_tokens)  # fmt: skip
    with torch.cuda.device(bonus_tokens.device):
        return launch_build_tree(
            bonus_tokens, parent_list, top_scores_index, draft_tokens, seq_lens,
            num_steps, topk, num_draft_tokens,
        )  # fmt: skip


def _parents(
    parent_list: torch.Tensor, top_scores_index: torch.Tensor, candidates: int, topk: int
) -> torch.Tensor:
    """The parent of each node, int64 [B, W]; -1 for the root, which has none."""
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
    """Place of the first match along the last dimension, -1 if there is none."""
    return torch.where(is_match.any(-1), is_match.int().argmax(-1), -1)


def _check(
    bonus_tokens: torch.Tensor,
    parent_list: torch.Tensor,
    top_scores_index: torch.Tensor,
    draft_tokens: torch.Tensor,
    seq_lens: torch.Tensor,
    num_steps: int,
    topk: int,
    num_draft_tokens: int,
) -> None:
    demand_between("build_tree", 0, math.inf, num_steps=num_steps)
    demand_between("build_tree", 1, math.inf, topk=topk)
    most = 1 + num_candidates(num_steps, topk)
    demand_between("build_tree", 1, most, num_draft_tokens=num_draft_tokens)

    requests, selected = bonus_tokens.numel(), num_draft_tokens - 1
    branches = topk * (num_steps - 1) + 1
    if num_steps <= 1 and parent_list.dim() and not parent_list.shape[-1]:
        branches = 0  # there is nothing but the root that a node could hang on
    long = (torch.int64,)
    for field, tensor, shape, dtypes in (
        ("bonus_tokens", bonus_tokens, (requests,), long),
        ("parent_list", parent_list, (requests, branches), long),
        ("top_scores_index", top_scores_index, (requests, selected), long),
        ("draft_tokens", draft_tokens, (requests, selected), long),
        ("seq_lens", seq_lens, (requests,), (torch.int32, torch.int64)),
    ):
        demand_tensor("build_tree", field, tensor, shape, dtypes, bonus_tokens.device)
