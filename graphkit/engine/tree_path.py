"""Moving an accepted tree path to where a chain would have it."""

from __future__ import annotations

from typing import Protocol

import torch

from graphkit.ops import compact_accepted_to_front


class MovableKVPool(Protocol):
    """Any of the pools of ``graphkit.kv``."""

    def move_kv_cache(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        """Copy slots; every source is read before any target is written."""


def finalize_accepted_tree_path(
    kv_pool: MovableKVPool,
    accept_index: torch.Tensor,
    out_cache_loc: torch.Tensor,
    predict: torch.Tensor,
    hidden_states: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Put each request's accepted nodes at the front of its W rows: KV, predict, hidden states.

    A chain is there already: call this for trees only. Enqueues; never synchronises.

    Args:
        kv_pool: The target's.
        accept_index: Flat ids of the accepted nodes, -1 padded.
        out_cache_loc: Slot of each node.
        predict: Token after each node.
        hidden_states: The target's, if it made any.

    Returns:
        predict and hidden states in their new order; rows behind the path are of no meaning.

    Shapes:
        accept_index: [B, S + 1] int32. out_cache_loc: [B * W] int64. predict: [B * W].
        hidden_states: [B * W, H].
    """
    requests, path = accept_index.shape
    width = out_cache_loc.shape[0] // requests if requests else path
    is_accepted = accept_index >= 0
    source = out_cache_loc[accept_index.clamp(min=0).long()]
    target = out_cache_loc.view(requests, width)[:, :path]
    # What was not accepted moves from the dummy slot to the dummy slot.
    kv_pool.move_kv_cache(
        torch.where(is_accepted, target, 0).flatten(), torch.where(is_accepted, source, 0).flatten()
    )
    predict = compact_accepted_to_front(predict, accept_index, width)
    if hidden_states is not None:
        hidden_states = compact_accepted_to_front(hidden_states, accept_index, width)
    return predict, hidden_states
