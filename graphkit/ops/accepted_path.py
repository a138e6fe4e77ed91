"""The nodes on each request's accepted path, moved to the front of its rows or slots.

Dimensions: B requests, W nodes of each, A columns of accept_index.
"""

from __future__ import annotations

from typing import Annotated, Any

import torch

from graphkit.errors import InputError
from graphkit.ops.registration import register_op


def _check_path(args: Any) -> None:
    """Refuse a path of more nodes than a tree has."""
    columns = args.accept_index.shape[1]
    if columns > args.num_draft_tokens:
        raise InputError(
            f"{type(args).__name__}: accept_index has {columns} columns, expected at most "
            f"num_draft_tokens = {args.num_draft_tokens}, the nodes of a tree.",
            field="accept_index",
        )


def _check_rows(args: Any) -> None:
    """Refuse a path of more nodes than a tree has, and elements that the kernel cannot copy."""
    _check_path(args)
    if args.x.element_size() > 8:
        raise InputError(
            f"compact_accepted_to_front: x is {args.x.dtype}, expected elements of at most 8 "
            "bytes. Pass torch.view_as_real(x).",
            field="x",
        )


@register_op(
    fake=lambda args: args.x.new_empty(args.x.shape),
    check=_check_rows,
    sizes_from=("accept_index",),
)
def compact_accepted_to_front(
    x: Annotated[torch.Tensor, "[B * W, ...]"],
    accept_index: Annotated[torch.Tensor, "[B, A] int32 or int64"],
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
            row 0, which has no meaning there. A is at most W.
        num_draft_tokens: Rows per request (W).

    Returns:
        The copy, contiguous, of x's shape and dtype.
    """
    compacted = x.clone(memory_format=torch.contiguous_format)
    if x.numel():
        front = compacted.view(-1, num_draft_tokens, *x.shape[1:])[:, : accept_index.shape[1]]
        front.copy_(x[accept_index.clamp(0, x.shape[0] - 1)])
    return compacted


def empty_moves(args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate the results of ``accepted_moves``."""
    slots, entries = args.out_cache_loc, args.accept_index.numel()
    return slots.new_empty(entries), slots.new_empty(entries)


@register_op(fake=empty_moves, check=_check_path)
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
