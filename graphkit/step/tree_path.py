"""Compaction of accepted tree paths: KV cache, predicted tokens and hidden states."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graphkit.kv import KVPool
from graphkit.ops import compact_accepted_to_front
from graphkit.ops.accepted_path import accepted_moves


def move_accepted_kv(
    kv_pools: Sequence[KVPool],
    accept_index: torch.Tensor,
    out_cache_loc: torch.Tensor,
    width: int,
) -> None:
    """Move each request's accepted nodes to the first of its W = ``width`` KV slots.

    A node has the same slot in all pools. Other arguments and shapes are those of
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
