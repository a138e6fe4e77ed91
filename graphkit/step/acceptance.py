"""Acceptance of drafted tokens: greedy, or from the target's distribution.

Shape letters: B requests, W nodes of each, P columns of accept_index, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from graphkit.ops import tree_speculative_sampling_target_only, verify_tree_greedy
from graphkit.ops.philox import philox_uniform

Links = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""``retrieve_index``, ``retrieve_next_token`` and ``retrieve_next_sibling``, [B, W] int64 each."""


class AcceptedPath(NamedTuple):
    """Accepted nodes of each request.

    Shapes:
        predict: [B * W] int32, the target's token after each accepted node.
        accept_index: [B, P] int32, flat rows of the accepted nodes, padded with -1.
        num_accepted_drafts: [B] int32, the bonus token excluded.
    """

    predict: torch.Tensor
    accept_index: torch.Tensor
    num_accepted_drafts: torch.Tensor


def accept_greedily(
    candidates: torch.Tensor, links: Links, logits: torch.Tensor, longest_path: int
) -> AcceptedPath:
    """Accept the drafts that equal the target's most probable tokens.

    Args:
        candidates: Token of each node, [B, W] int64.
        links: Links of the trees.
        logits: The target's, [B * W, V].
        longest_path: Most tokens of a path, the bonus token included (P).
    """
    path = _empty_path(candidates, longest_path)
    verify_tree_greedy(*path, candidates, *links, logits.argmax(-1).view(candidates.shape))
    return path


def accept_sampled(
    candidates: torch.Tensor,
    links: Links,
    logits: torch.Tensor,
    longest_path: int,
    *,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> AcceptedPath:
    """Accept drafts so that the tokens follow the target's distribution, whatever is drafted.

    Args:
        candidates: Token of each node, [B, W] int64.
        links: Links of the trees.
        logits: The target's, [B * W, V].
        longest_path: Most tokens of a path, the bonus token included (P).
        temperatures: Of each request, [B] float32; 0 is greedy.
        seeds: Keys of the random numbers, [B] int64.
        positions: Positions of the roots, [B] int32; a request draws once at each.
    """
    width = candidates.shape[1]
    path = _empty_path(candidates, longest_path)
    probs = target_distribution(logits, temperatures.repeat_interleave(width))
    probs = probs.view(*candidates.shape, -1)
    # One draw per node, and one for the bonus token.
    samples = philox_uniform(seeds, positions, width + 1)
    tree_speculative_sampling_target_only(
        *path, candidates, *links,
        samples[:, :width].contiguous(), samples[:, width].contiguous(),
        probs, torch.zeros_like(probs), 1.0, 1.0,
    )  # fmt: skip
    return path


def sample_tokens(
    logits: torch.Tensor,
    *,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """Draw one token per row of logits, [B, V]; returns [B] int64. See ``accept_sampled``."""
    root = torch.zeros_like(seeds)[:, None]
    leaf = torch.full_like(root, -1)
    index = torch.arange(len(root), device=root.device)[:, None]
    path = accept_sampled(
        root, (index, leaf, leaf), logits, 1,
        temperatures=temperatures, seeds=seeds, positions=positions,
    )  # fmt: skip
    return path.predict.long()


def target_distribution(logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """Return the distribution from which each row's token is drawn.

    Shapes:
        logits: [rows, V].
        temperatures: [rows] float32; 0 puts all probability on the most probable token.
        result: [rows, V] float32.
    """
    is_greedy = (temperatures == 0)[:, None]
    # Relative to the largest logit, overflow at low temperatures yields -inf: probability 0.
    behind = logits.float() - logits.amax(-1, keepdim=True).float()
    scaled = behind / torch.where(is_greedy, 1.0, temperatures[:, None])
    greedy = torch.zeros_like(scaled).scatter(1, logits.argmax(-1, keepdim=True), 1.0)
    return torch.where(is_greedy, greedy, scaled.softmax(-1))


def _empty_path(candidates: torch.Tensor, longest_path: int) -> AcceptedPath:
    requests = len(candidates)
    predict = torch.zeros_like(candidates.flatten(), dtype=torch.int32)
    return AcceptedPath(
        predict, predict.new_empty(requests, longest_path), predict.new_empty(requests)
    )
