"""The nodes on each request's accepted path, moved to the front of its rows or slots.

Dimensions: B requests, W nodes of each, A columns of accept_index.
"""

from __future__ import annotations

from typing import Annotated

import torch

from graphkit.ops.registration import register_op
from graphkit.ops.rows import check_elements


@register_op(
    fake=lambda args: args.x.new_empty(args.x.shape),
    check=lambda args: check_elements("compact_accepted_to_front", "x", args.x),
    sizes_from=("accept_index",),
)
def compact_accepted_to_front(
    x: Annotated[torch.Tensor, "[B * W, ...]"],
    accept_index: Annotated[torch.Tensor, "[B, A <= W] int32 or int64"],
    num_draft_tokens: Annotated[int, "W >= 1"],
) -> torch.Tensor:
    """Copy ``x`` with the rows of the accepted path at the front of each request's W rows.

    Code that expects the accepted tokens of a request as a chain can read the result. With topk 1
    the path is the front already and the copy equals ``x``. In a capture the result is in the
    graph's pool.

    Args:
        x: One row per tree node, such as predicted tokens or hidden states. An element has 1, 2, 4
            or 8 bytes.
        accept_index: Row of each accepted node, -1 behind the end of the path. Such an entry copies
            row 0, which has no meaning there.
        num_draft_tokens: Rows per request (W).

    Returns:
        The copy, contiguous, of x's shape and dtype.
    """
    compacted = x.clone(memory_format=torch.contiguous_format)
    if x.numel():
        front = compacted.view(-1, num_draft_tokens, *x.shape[1:])[:, : accept_index.shape[1]]
        front.copy_(x[accept_index.clamp(0, x.shape[0] - 1)])
    return compacted


@register_op()
def accepted_moves(
    accept_index: Annotated[torch.Tensor, "[B, A <= W] int32"],
    out_cache_loc: Annotated[torch.Tensor, "[B * W] int64"],
    num_draft_tokens: Annotated[int, "W >= 1"],
) -> tuple[
    Annotated[torch.Tensor, "[B * A] int64"],
    Annotated[torch.Tensor, "[B * A] int64"],
]:
    """Return the KV slots to write and to read, so that each path is at the front of its W slots.

    Args:
        accept_index: Row of each accepted node, -1 behind the end of the path.
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
