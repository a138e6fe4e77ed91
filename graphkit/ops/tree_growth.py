"""Growth of a draft tree step by step, and selection of the nodes to verify.

The candidates of a request are numbered: K of step 0, then K * K of each further step, one row of
K per branch. A branch of step s is one of the K best candidates of that step, and its parent is
the branch that it continues. The layout follows EAGLE-2 (arXiv 2406.16858), as ``build_tree``
reads it.

Among candidates of equal score the smaller number ranks first, and NaN ranks before any number. A
child's score is its parent's times a probability, so no parent ranks behind its child, and the
selected nodes form one tree.

Dimensions: B requests, K branches, S num_steps, N candidates, K + (S - 1) * K * K, P parents, K *
(S - 1) + 1, D draft slots, K * S, W nodes to verify.
"""

from __future__ import annotations

from typing import Annotated, Any

import torch

from graphkit.errors import InputError
from graphkit.ops.registration import register_op
from graphkit.ops.tree import num_candidates


@register_op()
def plant_tree(
    topk_p: Annotated[torch.Tensor, "[B, K >= 1] float32"],
    topk_index: Annotated[torch.Tensor, "[B, K] int64"],
    num_steps: Annotated[int, "S >= 1"],
) -> tuple[
    Annotated[torch.Tensor, "[B, K + (S - 1) * K * K] float32"],
    Annotated[torch.Tensor, "[B, K + (S - 1) * K * K] int64"],
    Annotated[torch.Tensor, "[B, K * (S - 1) + 1] int64"],
    Annotated[torch.Tensor, "[B * K] int64"],
    Annotated[torch.Tensor, "[B, K, K * S] bool"],
]:
    """Begin a tree with the candidates of step 0, each of which is a branch.

    Args:
        topk_p: Probabilities of the candidates.
        topk_index: Their token ids.
        num_steps: Draft steps of the whole tree (S).

    Returns:
        A tuple of five tensors:

        scores, tokens: [B, N] float32 and int64, of all candidates; entries of further steps are
        undefined.
        parent_list: [B, P] int64, candidate that each branch continues, -1 for the root; branches
        of further steps are undefined.
        rows: [B * K] int64, flat row ``b`` of the request of each branch, which holds its hidden
        state.
        mask: [B, K, K * S] bool, True where a branch sees a draft slot; branch k of step s writes
        slot k * S + s.
    """
    requests, topk = topk_p.shape
    more = num_candidates(num_steps, topk) - topk
    first = torch.arange(-1, topk * (num_steps - 1), device=topk_p.device)
    branch = torch.arange(topk, device=topk_p.device)
    slot = torch.arange(topk * num_steps, device=topk_p.device)
    return (
        torch.cat([topk_p, topk_p.new_zeros(requests, more)], 1),
        torch.cat([topk_index, topk_index.new_zeros(requests, more)], 1),
        first.repeat(requests, 1),
        torch.arange(requests, device=topk_p.device).repeat_interleave(topk),
        (slot == branch[:, None] * num_steps).repeat(requests, 1, 1),
    )


def _check_step(args: Any) -> None:
    """Refuse a step that the tree does not have."""
    topk, slots = args.mask.shape[1:]
    steps, rest = divmod(slots, topk)
    if rest or args.step >= steps or args.scores.shape[1] != num_candidates(steps, topk):
        raise InputError(
            f"grow_tree: step is {args.step}, scores has {args.scores.shape[1]} candidates and "
            f"mask {slots} slots of {topk} branches. Pass the tensors of plant_tree, and steps "
            f"below its num_steps.",
            field="step",
        )


@register_op(
    mutates_args=("scores", "tokens", "parent_list"),
    check=_check_step,
    sizes_from=("branch_scores",),
)
def grow_tree(
    scores: Annotated[torch.Tensor, "[B, N] float32, contiguous"],
    tokens: Annotated[torch.Tensor, "[B, N] int64, contiguous"],
    parent_list: Annotated[torch.Tensor, "[B, P] int64, contiguous"],
    branch_scores: Annotated[torch.Tensor, "[B, K >= 1] float32"],
    topk_p: Annotated[torch.Tensor, "[B * K, K] float32"],
    topk_index: Annotated[torch.Tensor, "[B * K, K] int64"],
    mask: Annotated[torch.Tensor, "[B, K, D] bool"],
    step: Annotated[int, "step >= 1"],
) -> tuple[
    Annotated[torch.Tensor, "[B, K] float32"],
    Annotated[torch.Tensor, "[B, K] int64"],
    Annotated[torch.Tensor, "[B, K] int64"],
    Annotated[torch.Tensor, "[B * K] int64"],
    Annotated[torch.Tensor, "[B, K, D] bool"],
]:
    """Add the candidates after each branch, and continue with the K best of them.

    Args:
        scores: Scores of all candidates; receives this step's.
        tokens: Tokens of all candidates; receives this step's.
        parent_list: Candidates that branches continue; receives this step's,
            unless it is the last one.
        branch_scores: Scores of the branches of the step before.
        topk_p: Probabilities of the candidates after each branch.
        topk_index: Their token ids.
        mask: Draft slots that the branches of the step before see. D is K * S.
        step: Number of this step, from 1. Below S.

    Returns:
        Of the new branches: scores, [B, K] float32; tokens, [B, K] int64; the branch before that
        each continues, [B, K] int64; the flat row ``b * K + branch`` of that branch, [B * K] int64;
        and the draft slots that they see, their own included, [B, K, K * S] bool.
    """
    (requests, topk), device = branch_scores.shape, branch_scores.device
    steps, first = mask.shape[2] // topk, num_candidates(step, topk)
    new_scores = (branch_scores.flatten()[:, None] * topk_p).view(requests, topk * topk)
    new_tokens = topk_index.reshape(requests, topk * topk)
    scores[:, first : first + topk * topk] = new_scores
    tokens[:, first : first + topk * topk] = new_tokens
    order = new_scores.sort(dim=1, descending=True, stable=True).indices[:, :topk]
    column = topk * step + 1
    if column < parent_list.shape[1]:
        parent_list[:, column : column + topk] = order + first
    parents = order // topk
    rows = torch.arange(requests, device=device)[:, None] * topk + parents
    slot, branch = torch.arange(mask.shape[2], device=device), torch.arange(topk, device=device)
    own = slot == branch[:, None] * steps + step
    seen = mask.gather(1, parents[:, :, None].expand_as(mask)) | own
    return new_scores.gather(1, order), new_tokens.gather(1, order), parents, rows.flatten(), seen


@register_op()
def choose_nodes(
    scores: Annotated[torch.Tensor, "[B, N >= 1] float32"],
    tokens: Annotated[torch.Tensor, "[B, N] int64"],
    num_draft_tokens: Annotated[int, "1 <= W <= N + 1"],
) -> tuple[
    Annotated[torch.Tensor, "[B, W - 1] int64"],
    Annotated[torch.Tensor, "[B, W - 1] int64"],
]:
    """Return the W - 1 best candidates of all steps, which join the root.

    Args:
        scores: Scores of all candidates.
        tokens: Their token ids.
        num_draft_tokens: Nodes per tree, the root included (W).

    Returns:
        Numbers of the selected candidates, ascending, and their token ids, each [B, W - 1] int64.
    """
    ranked = scores.sort(dim=1, descending=True, stable=True).indices
    chosen = ranked[:, : num_draft_tokens - 1].sort(1).values
    return chosen, tokens.gather(1, chosen)
