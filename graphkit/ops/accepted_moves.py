"""Moves of the KV of accepted nodes.

Dimensions: B requests, W nodes of each, A columns of accept_index.
"""

from __future__ import annotations

from typing import Annotated, Any

import torch

from graphkit.errors import InputError
from graphkit.ops.registration import register_op


def _check_nodes(given: Any) -> None:
    """Refuse a path of more nodes than a tree has."""
    columns = given.accept_index.shape[1]
    if columns > given.num_draft_tokens:
        raise InputError(
            f"accepted_moves: accept_index has {columns} columns, expected at most "
            f"num_draft_tokens = {given.num_draft_tokens}, the nodes of a tree.",
            field="accept_index",
        )


def empty_moves(given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate the results of ``accepted_moves``."""
    slots, entries = given.out_cache_loc, given.accept_index.numel()
    return slots.new_empty(entries), slots.new_empty(entries)


@register_op(fake=empty_moves, check=_check_nodes)
def accepted_moves(
    accept_index: Annotated[torch.Tensor, "[B, A] int32"],
    out_cache_loc: Annotated[torch.Tensor, "[B * W] int64"],
    num_draft_tokens: Annotated[int, "W >= 1"],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the KV slots to write and to read, so that each path is at the front of its W slots.

    Args:
        accept_index: Row of each accepted node, -1 behind the end of the path. A is at most W.
        out_cache_loc: KV slot of each node.
        num_draft_tokens: Nodes per request (W).

    Returns:
        Targets and sources for ``move_kv_cache``, each [B * A] int64. Entries behind a path are 0
        in both, the slot of pad rows.
    """
    is_accepted = accept_index >= 0
    front = out_cache_loc.view(-1, num_draft_tokens)[:, : accept_index.shape[1]]
    source = out_cache_loc[accept_index.clamp(min=0).long()]
    target, source = (torch.where(is_accepted, slots, 0) for slots in (front, source))
    return target.flatten(), source.flatten()
