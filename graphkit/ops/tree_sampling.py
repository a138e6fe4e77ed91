"""Sampled verification of a draft tree.

Dimensions: B requests, W nodes per request, A columns of accept_index, V vocabulary.
"""

# ruff: noqa: N806 - suffixes of tensor names are dimensions
from __future__ import annotations

from typing import Annotated

import torch

from graphkit.errors import ConfigError
from graphkit.ops.registration import register_op
from graphkit.ops.sampling import sample_rows
from graphkit.ops.tree_walk import TreeWalk, pick, write_paths


@register_op(
    mutates_args=("predicts", "accept_index", "accept_token_num"),
    sizes_from=("candidates",),
    number_error=ConfigError,
)
def tree_speculative_sampling_target_only(
    predicts: Annotated[torch.Tensor, "[B * W] int32, contiguous"],
    accept_index: Annotated[torch.Tensor, "[B, A >= 1] int32, contiguous"],
    accept_token_num: Annotated[torch.Tensor, "[B] int32, contiguous"],
    candidates: Annotated[torch.Tensor, "[B, W >= 1] int64"],
    retrieve_index: Annotated[torch.Tensor, "[B, W] int64"],
    retrieve_next_token: Annotated[torch.Tensor, "[B, W] int64"],
    retrieve_next_sibling: Annotated[torch.Tensor, "[B, W] int64"],
    uniform_samples: Annotated[torch.Tensor, "[B, W] float32"],
    uniform_samples_for_final_sampling: Annotated[torch.Tensor, "[B] float32"],
    target_probs: Annotated[torch.Tensor, "[B, W, V >= 1] float32"],
    draft_probs: Annotated[torch.Tensor | None, "[B, W, V] float32"] = None,
    threshold_single: Annotated[float, "0 <= threshold_single <= 1"] = 1.0,
    threshold_acc: Annotated[float, "0 <= threshold_acc <= 1"] = 1.0,
) -> None:
    """Accept a path of each tree by one uniform sample per node, then draw the bonus token.

    At a node with sample u, the children are tried in their order. Let p be the target's
    probability of the child's token at that node, 0 if an earlier sibling holds the same token,
    and s the running sum of p. The child is accepted if ``u * threshold_acc < s`` or
    ``p >= threshold_single``; a child with p = 0 never is. The walk ends when no child is accepted
    or when accept_index has no column left.

    The bonus token follows the last accepted node. It is drawn from
    ``max(target_probs - draft_probs, 0)`` of that node without the tokens refused there, by
    inverse transform: the first token whose running sum exceeds the final sample times the total.
    ``draft_probs`` is subtracted even if the whole path was accepted and nothing was refused.
    Where the total is 0 or not finite, the bonus token is the most probable one of the target's
    row, NaN excluded.

    By default, with both thresholds 1 and without draft_probs, tokens follow the target's
    distribution exactly for any drafts: a child is accepted for u in [s - p, s), an interval of
    length p, and the bonus token shares the rest in proportion. A threshold below 1 accepts more;
    draft_probs change the distribution of the bonus token. See ``accept_by_rejection`` for drafts
    that were sampled from known probabilities.

    Contract of SGLang's op of this name (sgl-kernel, speculative_sampling.cu), with two
    differences: equal siblings count their probability once, and a token of probability 0 is
    refused at every threshold. What is written, and how damaged links are treated, is as in
    ``verify_tree_greedy``. A node that a path visits several times, along a cycle, gets the token
    after its last visit. A drafted token outside the vocabulary has p = 0. A sample outside [0, 1)
    is compared like any other; a final sample of 1, above it or NaN draws the last token that has a
    probability.

    Args:
        predicts: Tokens by flat id, written along the accepted paths.
        accept_index: Receives the accepted paths. A is usually num_steps + 1.
        accept_token_num: Receives the number of accepted drafts, the bonus token excluded.
        candidates: Token of each node.
        retrieve_index: Flat id of each node.
        retrieve_next_token: First child of each node, -1 if it has none.
        retrieve_next_sibling: Next child of the same parent, -1 if there is none.
        uniform_samples: Sample of each node, in [0, 1).
        uniform_samples_for_final_sampling: Sample of each request's bonus token, in [0, 1).
        target_probs: The target's distribution after each node.
        draft_probs: Subtracted from the target's before the bonus token is drawn; None for zeros.
        threshold_single: Probability from which a drafted token is always accepted.
        threshold_acc: Factor on the samples.
    """
    request_B = torch.arange(candidates.shape[0], device=candidates.device)
    walk = TreeWalk(retrieve_next_token, retrieve_next_sibling, accept_index.shape[1])
    coin_B = uniform_samples[:, 0]
    sum_B = torch.zeros_like(coin_B)
    left_BV = target_probs[:, 0].clone()  # the node's row without refused tokens
    for child_B in walk:
        token_B = pick(candidates, child_B)
        in_vocab_B = walk.has_child_B & (token_B >= 0) & (token_B < left_BV.shape[1])
        safe_token_B = torch.where(in_vocab_B, token_B, 0)
        p_B = pick(left_BV, safe_token_B)
        has_mass_B = in_vocab_B & (p_B > 0)
        sum_B = sum_B + torch.where(has_mass_B, p_B, 0)
        takes_B = (coin_B * threshold_acc < sum_B) | (p_B >= threshold_single)
        accepted_B = walk.settle(child_B, has_mass_B & takes_B)

        coin_B = torch.where(accepted_B, pick(uniform_samples, child_B), coin_B)
        sum_B = torch.where(accepted_B, 0, sum_B)
        left_BV[request_B, safe_token_B] = torch.where(in_vocab_B, 0, p_B)
        row_BV = target_probs[request_B, walk.node_B]
        left_BV = torch.where(accepted_B[:, None], row_BV, left_BV)

    if draft_probs is not None:
        left_BV = left_BV - draft_probs[request_B, walk.node_B]
    fallback_BV = target_probs[request_B, walk.node_B]
    final_B = sample_rows(left_BV.relu(), fallback_BV, uniform_samples_for_final_sampling)
    token_BA = walk.tokens_after(candidates, final_B)
    write_paths(predicts, accept_index, accept_token_num, retrieve_index, walk, token_BA)
