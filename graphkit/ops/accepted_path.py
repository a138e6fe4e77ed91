"""Rows of the nodes on each request's accepted path.

Dimensions: B requests, W nodes of each, A columns of accept_index.
"""

from __future__ import annotations

from typing import Annotated, Any

import torch

from graphkit.errors import InputError
from graphkit.ops.registration import register_op


def _check_path(given: Any) -> None:
    """Refuse a path of more than W nodes and elements that the kernel cannot copy."""
    columns = given.accept_index.shape[1]
    if columns > given.num_draft_tokens:
        raise InputError(
            f"compact_accepted_to_front: accept_index has {columns} columns, expected at most "
            f"num_draft_tokens = {given.num_draft_tokens}, the nodes of a tree.",
            field="accept_index",
        )
    if given.x.element_size() > 8:
        raise InputError(
            f"compact_accepted_to_front: x is {given.x.dtype}, expected elements of at most 8 "
            "bytes. Pass torch.view_as_real(x).",
            field="x",
        )


@register_op(
    fake=lambda given: given.x.new_empty(given.x.shape),
    check=_check_path,
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
