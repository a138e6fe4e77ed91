"""Acceptance of drafted tokens: greedy, or from the target's distribution.

Shape letters: B requests, W nodes of each, P columns of accept_index, V vocabulary, R request rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from graphkit.ops.accepted_tokens import accept_samples, accept_tokens
from graphkit.ops.argmax import argmax_rows
from graphkit.ops.rejection import accept_by_rejection
from graphkit.ops.target_probs import target_probs

Links = tuple[torch.Tensor, torch.Tensor]
"""``retrieve_next_token`` and ``retrieve_next_sibling``, [B, W] int64 each."""


class AcceptedPath(NamedTuple):
    """Accepted nodes of each request. See ``ops.accepted_tokens``.

    Shapes:
        predict: [B * W] int64, the target's token after each accepted node, in the order of the
            path from the first of the request's entries on; 0 behind it.
        accept_index: [B, P] int32, flat rows of the accepted nodes, padded with -1.
        num_accepted_drafts: [B] int32, the bonus token excluded.
        num_accepted_tokens: [B] int32, the bonus token included.
    """

    predict: torch.Tensor
    accept_index: torch.Tensor
    num_accepted_drafts: torch.Tensor
    num_accepted_tokens: torch.Tensor


class Draws(NamedTuple):
    """What the random numbers of requests depend on, by request row.

    Shapes:
        req_pool_indices: [B] int64, rows of the requests.
        temperatures: [R] float32; 0 is greedy.
        top_ks: [R] int32, see ``ops.target_probs`` for these three.
        top_ps: [R] float32.
        min_ps: [R] float32.
        seeds: [R] int64, keys of the random numbers.
        positions: [R] int32, positions of the roots; a request draws once at each.
    """

    req_pool_indices: torch.Tensor
    temperatures: torch.Tensor
    top_ks: torch.Tensor
    top_ps: torch.Tensor
    min_ps: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor


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
    target_predict = candidates.new_empty(len(logits))
    argmax_rows(target_predict, logits)
    return AcceptedPath(*accept_tokens(candidates, *links, target_predict, longest_path))


def accept_sampled(
    candidates: torch.Tensor,
    links: Links,
    logits: torch.Tensor,
    longest_path: int,
    draws: Draws,
    draft_probs: torch.Tensor | None = None,
) -> AcceptedPath:
    """Accept drafts so that the tokens follow the target's distribution, for any drafts.

    Args:
        candidates: Token of each node, [B, W] int64.
        links: Links of the trees.
        logits: The target's, [B * W, V].
        longest_path: Most tokens of a path, the bonus token included (P).
        draws: What the draws depend on.
        draft_probs: Distributions that the drafts were sampled from, [B * W, V]. ``None`` accepts
            drafts that equal the target's sample; see ``ops.rejection`` for the other rule.
    """
    rows, temperatures, top_ks, top_ps, min_ps, seeds, positions = draws
    probs = target_probs(logits, rows, temperatures, top_ks, top_ps, min_ps, candidates.shape[1])
    if draft_probs is None:
        path = accept_samples(candidates, *links, probs, rows, seeds, positions, longest_path)
    else:
        path = accept_by_rejection(
            candidates, *links, probs, draft_probs, rows, seeds, positions, longest_path
        )
    return AcceptedPath(*path)


def sample_tokens(logits: torch.Tensor, draws: Draws) -> torch.Tensor:
    """Draw one token per row of logits, [B, V]; returns [B] int64. See ``accept_sampled``."""
    root = torch.zeros_like(draws.req_pool_indices)[:, None]
    leaf = torch.full_like(root, -1)
    return accept_sampled(root, (leaf, leaf), logits, 1, draws).predict
