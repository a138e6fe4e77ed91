"""Acceptance of drafted tokens, by the target's most probable tokens or by its samples.

The accepted path of a tree then moves to the front of the request's rows and KV slots.

Shape letters: B requests, W nodes of each, P columns of accept_index, V vocabulary, R request rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from graphkit.engine.kv import KVPool
from graphkit.engine.step.processors import TargetLogits
from graphkit.ops import compact_accepted_to_front
from graphkit.ops.accepted_path import accepted_moves
from graphkit.ops.logits import argmax_rows
from graphkit.ops.rejection import accept_by_rejection
from graphkit.ops.sampling import target_samples
from graphkit.ops.target_probs import target_probs
from graphkit.ops.verification import accept_tokens

Links = tuple[torch.Tensor, torch.Tensor]
"""``retrieve_next_token`` and ``retrieve_next_sibling``, [B, W] int64 each."""


class AcceptedPath(NamedTuple):
    """Accepted nodes of each request. See ``accept_tokens``.

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
        positions: [R] int32, positions of the roots.
    """

    req_pool_indices: torch.Tensor
    temperatures: torch.Tensor
    top_ks: torch.Tensor
    top_ps: torch.Tensor
    min_ps: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor


def accept_greedily(
    candidates: torch.Tensor, links: Links, logits: TargetLogits, longest_path: int
) -> AcceptedPath:
    """Accept the drafts that equal the target's most probable tokens.

    Args:
        candidates: Token of each node, [B, W] int64.
        links: Links of the trees.
        logits: The target's, of B * W rows.
        longest_path: Most tokens of a path, the bonus token included (P).
    """
    target_predict = most_probable(logits)
    return AcceptedPath(*accept_tokens(candidates, *links, target_predict, longest_path))


def most_probable(logits: TargetLogits) -> torch.Tensor:
    """Return the most probable token of each row, [N] int64."""
    tokens = torch.empty(len(logits.logits), dtype=torch.int64, device=logits.logits.device)
    argmax_rows(tokens, logits.logits, processed=logits.processed, is_processed=logits.is_processed)
    return tokens


def accept_sampled(
    candidates: torch.Tensor,
    links: Links,
    logits: TargetLogits,
    longest_path: int,
    draws: Draws,
    positions: torch.Tensor,
    draft_probs: torch.Tensor | None = None,
) -> AcceptedPath:
    """Accept drafts so that the tokens follow the target's distribution, for any drafts.

    A draft is accepted if it equals the target's own sample, which depends on the request's seed
    and its position alone (``target_samples``). The text is then the same for all drafts, or
    none. With ``draft_probs``, rejection sampling decides (``ops.rejection``): it accepts more
    drafts, and the text depends on them.

    Args:
        candidates: Token of each node, [B, W] int64.
        links: Links of the trees.
        logits: The target's, of B * W rows.
        longest_path: Most tokens of a path, the bonus token included (P).
        draws: What the draws depend on.
        positions: Position of each node, [B * W] int64.
        draft_probs: Distributions that the drafts were sampled from, [B * W, V], or ``None``.
    """
    rows, *_, seeds, roots = draws
    probs = _target_probs(logits, draws, candidates.shape[1])
    if draft_probs is None:
        samples = target_samples(probs, rows, seeds, positions.view(candidates.shape))
        path = accept_tokens(candidates, *links, samples, longest_path)
    else:
        path = accept_by_rejection(
            candidates, *links, probs, draft_probs, rows, seeds, roots, longest_path
        )
    return AcceptedPath(*path)


def sample_tokens(logits: TargetLogits, draws: Draws) -> torch.Tensor:
    """Draw the target's token at each request's root, [B] int64, from logits [B, V]."""
    rows, *_, seeds, positions = draws
    probs = _target_probs(logits, draws, 1)
    return target_samples(probs, rows, seeds, positions[rows].long()[:, None])


def _target_probs(logits: TargetLogits, draws: Draws, width: int) -> torch.Tensor:
    rows, temperatures, top_ks, top_ps, min_ps, _, _ = draws
    return target_probs(
        logits.logits, rows, temperatures, top_ks, top_ps, min_ps, width, logits.processed,
        logits.is_processed,
    )  # fmt: skip


def move_accepted_kv(
    kv_pools: Sequence[KVPool],
    accept_index: torch.Tensor,
    out_cache_loc: torch.Tensor,
    width: int,
) -> None:
    """Move each request's accepted nodes to the first of its W = ``width`` KV slots.

    A node has the same slot in all pools. For the other arguments, see
    ``finalize_accepted_tree_path``.
    """
    target, source = accepted_moves(accept_index, out_cache_loc, width)
    for kv_pool in kv_pools:
        kv_pool.move_kv_cache(target, source)


def finalize_accepted_tree_path(
    kv_pool: KVPool,
    accept_index: torch.Tensor,
    out_cache_loc: torch.Tensor,
    predict: torch.Tensor,
    hidden_states: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Move each request's accepted nodes to the first of its W rows and KV slots.

    Needed for trees only: the accepted path of a chain is in place already. Enqueues on the current
    stream; never synchronises.

    Args:
        kv_pool: The target's KV pool; moved in place.
        accept_index: Flat rows of the accepted nodes, padded with -1.
        out_cache_loc: KV slot of each node.
        predict: The target's token after each node.
        hidden_states: The target's, or ``None``.

    Returns:
        ``predict`` and ``hidden_states`` as new tensors in the new order. Rows behind the path are
        undefined.

    Shapes:
        accept_index: [B, S + 1] int32. out_cache_loc: [B * W] int64. predict: [B * W].
        hidden_states: [B * W, H].
    """
    requests, path = accept_index.shape
    width = out_cache_loc.shape[0] // requests if requests else path
    move_accepted_kv((kv_pool,), accept_index, out_cache_loc, width)
    predict = compact_accepted_to_front(predict, accept_index, width)
    if hidden_states is not None:
        hidden_states = compact_accepted_to_front(hidden_states, accept_index, width)
    return predict, hidden_states
