"""Which drafted nodes a sampled target confirms, and the token after them.

Suffixes: B requests, W nodes per request, A columns of accept_index, V vocabulary.
"""

# ruff: noqa: N803, N806 - tensor suffixes are the house's notation
from __future__ import annotations

import torch

from graphkit.ops.tree_arguments import demand_between, demand_tensor
from graphkit.ops.tree_walk import TreeWalk, check_paths, pick, write_paths

_OP = "tree_speculative_sampling_target_only"


@torch.library.custom_op(
    f"graphkit::{_OP}",
    mutates_args=("predicts", "accept_index", "accept_token_num"),
    device_types="cpu",
)
def tree_speculative_sampling_target_only(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    uniform_samples: torch.Tensor,
    uniform_samples_for_final_sampling: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor,
    threshold_single: float,
    threshold_acc: float,
) -> None:
    """Walk each tree from its root by one coin per node, then sample the token after the last.

    At a node with coin u, its children are tried in their order. With p the target's probability of
    the child's token there, 0 if a sibling before it held that token, and s the sum of p so far,
    the child is accepted if ``u * threshold_acc < s`` or ``p >= threshold_single``; a child of
    p = 0 never is. The walk ends when none is, or when accept_index has no column left. The token
    after the last node comes from max(target_probs - draft_probs, 0) without the tokens refused
    there, by inverse cdf: the first token whose running sum exceeds the final coin times the total.

    With both thresholds 1 and draft_probs 0, tokens follow the target's distribution exactly,
    whatever was drafted: child i takes u in [s before i, s), a stretch as long as its p, and what
    no child takes is left to the other tokens in proportion. A threshold below 1 accepts more than
    that, and draft_probs other than 0 shift the last draw.

    Where the total is 0 or not finite, the token after is the target row's most probable one, NaN
    left out. What is written, and what a damaged tree does, is as in ``verify_tree_greedy``; a
    drafted token outside the vocabulary has p = 0.

    One launch on the current stream, none for an idle batch; never synchronises, may be captured.

    Args:
        predicts: Tokens by flat id, filled in along the accepted paths.
        accept_index: The accepted paths.
        accept_token_num: Accepted drafts, the bonus token excluded.
        candidates: Token of each node.
        retrieve_index: Flat id of each node.
        retrieve_next_token: First child of each node, -1 if none.
        retrieve_next_sibling: Next child of the same parent, -1 if none.
        uniform_samples: The coin of each node, in [0, 1).
        uniform_samples_for_final_sampling: The final coin of each request, in [0, 1).
        target_probs: The target's distribution after each node.
        draft_probs: Subtracted from the target's before the last draw; zeros to follow the target.
        threshold_single: Probability from which a drafted token is accepted outright.
        threshold_acc: Factor on the coins.

    Shapes:
        predicts: [B * W] int32. accept_index: [B, A] int32, A >= 1, usually num_steps + 1.
        accept_token_num: [B] int32. All three contiguous.
        candidates, retrieve_*: [B, W] int64. uniform_samples: [B, W] float32.
        uniform_samples_for_final_sampling: [B] float32.
        target_probs, draft_probs: [B, W, V] float32, V >= 1.

    Raises:
        InputError: A shape, dtype, device or layout does not fit.
        ConfigError: A threshold is not in 0 to 1.
    """
    paths = (predicts, accept_index, accept_token_num, candidates, retrieve_index,
             retrieve_next_token, retrieve_next_sibling)  # fmt: skip
    _check(paths, uniform_samples, uniform_samples_for_final_sampling, target_probs, draft_probs,
           threshold_single, threshold_acc)  # fmt: skip
    request_B = torch.arange(candidates.shape[0], device=candidates.device)
    walk = TreeWalk(retrieve_next_token, retrieve_next_sibling, accept_index.shape[1])
    coin_B = uniform_samples[:, 0]
    sum_B = torch.zeros_like(coin_B)
    left_BV = target_probs[:, 0].clone()  # the node's row, without what was refused there
    for child_B in walk:
        token_B = pick(candidates, child_B)
        is_word_B = walk.has_child_B & (token_B >= 0) & (token_B < left_BV.shape[1])
        word_B = torch.where(is_word_B, token_B, 0)
        p_B = pick(left_BV, word_B)
        counts_B = is_word_B & (p_B > 0)
        sum_B = sum_B + torch.where(counts_B, p_B, 0)
        takes_B = (coin_B * threshold_acc < sum_B) | (p_B >= threshold_single)
        accepted_B = walk.settle(child_B, counts_B & takes_B)

        coin_B = torch.where(accepted_B, pick(uniform_samples, child_B), coin_B)
        sum_B = torch.where(accepted_B, 0, sum_B)
        left_BV[request_B, word_B] = torch.where(is_word_B, 0, p_B)
        row_BV = target_probs[request_B, walk.node_B]
        left_BV = torch.where(accepted_B[:, None], row_BV, left_BV)

    weight_BV = (left_BV - draft_probs[request_B, walk.node_B]).relu()
    fallback_BV = target_probs[request_B, walk.node_B]
    final_B = _sample(weight_BV, fallback_BV, uniform_samples_for_final_sampling)
    after_BA = candidates.gather(1, walk.path_BA.clamp(min=0)).roll(-1, 1)
    token_BA = torch.where(walk.is_last(), final_B[:, None], after_BA)
    write_paths(predicts, accept_index, accept_token_num, retrieve_index, walk, token_BA)


@tree_speculative_sampling_target_only.register_fake
def _(*_: object, **__: object) -> None:
    """Nothing is returned, so there is no shape to tell."""


@tree_speculative_sampling_target_only.register_kernel("cuda")
def _(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    uniform_samples: torch.Tensor,
    uniform_samples_for_final_sampling: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor,
    threshold_single: float,
    threshold_acc: float,
) -> None:
    from graphkit.ops.kernels.tree_sampling import launch_tree_sampling

    paths = (predicts, accept_index, accept_token_num, candidates, retrieve_index,
             retrieve_next_token, retrieve_next_sibling)  # fmt: skip
    rest = (uniform_samples, uniform_samples_for_final_sampling, target_probs, draft_probs,
            threshold_single, threshold_acc)  # fmt: skip
    _check(paths, *rest)
    with torch.cuda.device(predicts.device):
        launch_tree_sampling(*paths, *rest)


def _sample(
    weight_BV: torch.Tensor, fallback_BV: torch.Tensor, coin_B: torch.Tensor
) -> torch.Tensor:
    """A token by inverse cdf, int64 [B]; the fallback's largest where the weights have no sum."""
    running_BV = weight_BV.double().cumsum(1)
    total_B = running_BV[:, -1]
    is_past_BV = running_BV > (coin_B * total_B)[:, None]
    token_V = torch.arange(weight_BV.shape[1], device=weight_BV.device)
    has_mass_BV = weight_BV > 0
    first_B = torch.where(is_past_BV & has_mass_BV, token_V, len(token_V)).amin(1)
    last_B = torch.where(has_mass_BV, token_V, -1).amax(1)  # a coin of 1 takes it
    largest_B = fallback_BV.masked_fill(fallback_BV.isnan(), -torch.inf).argmax(1)
    has_total_B = (total_B > 0) & (total_B < torch.inf)
    return torch.where(has_total_B, torch.minimum(first_B, last_B), largest_B)


def _check(
    paths: tuple[torch.Tensor, ...],
    uniform_samples: torch.Tensor,
    uniform_samples_for_final_sampling: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor,
    threshold_single: float,
    threshold_acc: float,
) -> None:
    check_paths(_OP, *paths)
    demand_between(_OP, 0, 1, threshold_single=threshold_single, threshold_acc=threshold_acc)
    requests, width = paths[3].shape
    vocab_size = max(target_probs.shape[-1], 1) if target_probs.dim() else 1
    for field, tensor, shape in (
        ("uniform_samples", uniform_samples, (requests, width)),
        ("uniform_samples_for_final_sampling", uniform_samples_for_final_sampling, (requests,)),
        ("target_probs", target_probs, (requests, width, vocab_size)),
        ("draft_probs", draft_probs, (requests, width, vocab_size)),
    ):
        demand_tensor(_OP, field, tensor, shape, (torch.float32,), paths[3].device)
