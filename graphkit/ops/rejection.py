"""Acceptance of drafts that were sampled from known probabilities.

Dimensions: B requests, W nodes of each, P tokens of the longest path, V vocabulary, R request rows.
"""

# ruff: noqa: N806 - suffixes of tensor names are dimensions
from __future__ import annotations

from typing import Annotated

import torch

from graphkit.ops.registration import register_op
from graphkit.ops.sampling import philox_uniform, sample_rows
from graphkit.ops.tree_walk import TreeWalk, pick, write_paths
from graphkit.ops.verification import Accepted, empty_path, flat_rows, ordered_paths


@register_op()
def accept_by_rejection(
    candidates: Annotated[torch.Tensor, "[B, W >= 1] int64"],
    retrieve_next_token: Annotated[torch.Tensor, "[B, W] int64"],
    retrieve_next_sibling: Annotated[torch.Tensor, "[B, W] int64"],
    target_probs: Annotated[torch.Tensor, "[B * W, V >= 1] float32"],
    draft_probs: Annotated[torch.Tensor, "[B * W, V] float32"],
    req_pool_indices: Annotated[torch.Tensor, "[B] int64"],
    seeds: Annotated[torch.Tensor, "[R] int64"],
    positions: Annotated[torch.Tensor, "[R] int32"],
    longest_path: Annotated[int, "1 <= P <= W"],
) -> Accepted:
    """Accept drafts by rejection sampling, so that tokens follow the target's distribution.

    Let p and q be the distributions of target and drafter after a node. A child is accepted with
    probability ``min(1, p / q)`` of its token. If it is refused, p becomes ``max(p - q, 0)``, q
    loses the token, both are normalised, and the next sibling is tried. The bonus token is drawn
    from the p that remains after the last accepted node.

    Tokens follow the target's distribution exactly if the children of each node were sampled from
    its q in their order, without replacement, as ``torch.multinomial`` samples them, and
    independently of the samples used here. For a chain this is speculative sampling (Leviathan et
    al., 2023; Chen et al., 2023), for a tree recursive rejection sampling without replacement (Jeon
    et al., 2024). A child of probability 0 in q is ignored, and so is one whose token an earlier
    sibling has. Where rounding leaves nothing of p, the bonus token is the target's most probable.

    The text depends on the drafts: with another drafter, tree or draft length, equal seeds give
    other tokens. ``target_samples`` with ``accept_tokens`` accepts fewer drafts, but the text does
    not depend on them.

    ``philox_uniform`` draws the samples at the position of the root: draw i of a request is for its
    node i, draw W for its bonus token. Draw 0 is not used.

    Args:
        candidates: Token of each node.
        retrieve_next_token: First child of each node, -1 if it has none.
        retrieve_next_sibling: Next child of the same parent, -1 if there is none.
        target_probs: The target's distribution after each node.
        draft_probs: The distribution that the children of each node were sampled from. Rows of
            nodes without children do not count.
        req_pool_indices: Request rows.
        seeds: Seeds by request row.
        positions: Positions of the roots by request row; a request draws once at each.
        longest_path: Most tokens of a path, the bonus token included (P).

    Returns:
        As ``accept_tokens``.
    """
    (requests, width), vocab_size = candidates.shape, target_probs.shape[1]
    samples = philox_uniform(seeds[req_pool_indices], positions[req_pool_indices], width + 1)
    p_BWV, q_BWV = (
        probs.view(requests, width, vocab_size) for probs in (target_probs, draft_probs)
    )
    request_B = torch.arange(requests, device=candidates.device)
    walk = TreeWalk(retrieve_next_token, retrieve_next_sibling, longest_path)
    p_BV, q_BV = p_BWV[:, 0], q_BWV[:, 0]  # of the node, without refused drafts
    p_sum_B1 = q_sum_B1 = samples.new_ones(requests, 1)
    for child_B in walk:
        token_B = pick(candidates, child_B)
        in_vocab_B = (token_B >= 0) & (token_B < vocab_size)
        token_B = torch.where(in_vocab_B, token_B, 0)
        share_BV, drafted_BV = p_BV / p_sum_B1, q_BV / q_sum_B1
        q_B = pick(drafted_BV, token_B)
        is_draft_B = walk.has_child_B & in_vocab_B & (q_B > 0)
        is_below_B = pick(samples, child_B) * q_B < pick(share_BV, token_B)
        accepted_B = walk.settle(child_B, is_draft_B & is_below_B)

        refused_B1 = (is_draft_B & ~accepted_B)[:, None]
        p_BV = torch.where(refused_B1, (share_BV - drafted_BV).relu(), p_BV)
        q_BV = torch.where(refused_B1, q_BV.scatter(1, token_B[:, None], 0.0), q_BV)
        p_sum_B1 = torch.where(refused_B1, p_BV.sum(1, keepdim=True), p_sum_B1)
        q_sum_B1 = torch.where(refused_B1, q_BV.sum(1, keepdim=True), q_sum_B1)
        accepted_B1 = accepted_B[:, None]
        p_BV = torch.where(accepted_B1, p_BWV[request_B, walk.node_B], p_BV)
        q_BV = torch.where(accepted_B1, q_BWV[request_B, walk.node_B], q_BV)
        p_sum_B1 = torch.where(accepted_B1, 1.0, p_sum_B1)
        q_sum_B1 = torch.where(accepted_B1, 1.0, q_sum_B1)

    bonus_B = sample_rows(p_BV, p_BWV[request_B, walk.node_B], samples[:, width])
    token_BA = walk.tokens_after(candidates, bonus_B)
    path = empty_path(candidates, longest_path)
    write_paths(*path, flat_rows(candidates), walk, token_BA)
    return ordered_paths(width, *path)
