"""Rows and slots of the nodes on each request's accepted path.

Suffixes: B requests, W num_draft_tokens, A columns of accept_index (num_steps + 1), T rows (B x W).
"""

# ruff: noqa: ARG001 - a fake kernel has its op's signature
from __future__ import annotations

from typing import Any

import torch

from graphkit.errors import InputError
from graphkit.ops.packed import read
from graphkit.ops.slot_arguments import Demands

_PATH = Demands("compact_accepted_to_front", accept_index="B A", num_draft_tokens="W")


@torch.library.custom_op("graphkit::compact_accepted_to_front", mutates_args=(), device_types="cpu")
def compact_accepted_to_front(
    x: torch.Tensor, accept_index: torch.Tensor, num_draft_tokens: int
) -> torch.Tensor:
    """Copy ``x`` with the rows of the accepted path at the front of each request's W rows.

    Whoever lays requests out as chains can read the result; with topk == 1 that holds already and
    nothing changes. One launch on the current stream; never synchronises, may be captured: the
    result then lies in the graph's pool.

    Args:
        x: A row per tree node, such as predicted tokens or hidden states.
        accept_index: Row of each accepted node, -1 where the path has ended. Such a place gets
            row 0, and is not to be read.
        num_draft_tokens: Rows per request (W).

    Shapes:
        x: [B * W, ...], any dtype of 1, 2, 4 or 8 bytes.
        accept_index: [B, A] int32 or int64, A <= W.
        Returns x's shape and dtype, contiguous.

    Raises:
        InputError: A shape, dtype, device or number does not fit.
    """
    _check_path(x, accept_index, num_draft_tokens)
    compacted = x.clone(memory_format=torch.contiguous_format)
    if x.numel():
        front = compacted.view(-1, num_draft_tokens, *x.shape[1:])[:, : accept_index.shape[1]]
        front.copy_(x[accept_index.clamp(0, x.shape[0] - 1)])
    return compacted


@compact_accepted_to_front.register_fake
def _(x: torch.Tensor, accept_index: torch.Tensor, num_draft_tokens: int) -> torch.Tensor:
    return x.new_empty(x.shape)


@compact_accepted_to_front.register_kernel("cuda")
def _(x: torch.Tensor, accept_index: torch.Tensor, num_draft_tokens: int) -> torch.Tensor:
    from graphkit.ops.kernels.accepted_path import launch_compact_accepted_to_front

    _check_path(x, accept_index, num_draft_tokens)
    with torch.cuda.device(x.device):
        return launch_compact_accepted_to_front(x, accept_index, num_draft_tokens)


def _check_path(x: torch.Tensor, accept_index: torch.Tensor, num_draft_tokens: int) -> None:
    _PATH.check(accept_index, num_draft_tokens)
    requests, columns = accept_index.shape
    if x.shape[:1] != (requests * num_draft_tokens,) or x.device != accept_index.device:
        raise InputError(
            f"compact_accepted_to_front got x of {list(x.shape)} on {x.device}: it must be "
            f"[{requests * num_draft_tokens}, ...] on {accept_index.device}, num_draft_tokens "
            "rows for each row of accept_index.",
            field="x",
        )
    if columns > num_draft_tokens:
        raise InputError(
            f"compact_accepted_to_front got accept_index of {columns} columns: a path has at most "
            f"num_draft_tokens = {num_draft_tokens} nodes.",
            field="accept_index",
        )
    if x.element_size() > 8:
        raise InputError(
            f"compact_accepted_to_front got x of {x.dtype}: it takes elements of at most 8 bytes. "
            "Pass torch.view_as_real(x).",
            field="x",
        )


_FILL = Demands(
    "fill_accepted_out_cache_loc",
    accept_index="N",
    out_cache_loc="slots",
    accepted_out_cache_loc="accepted!",
)


@torch.library.custom_op(
    "graphkit::fill_accepted_out_cache_loc",
    mutates_args=("accepted_out_cache_loc",),
    device_types="cpu",
)
def fill_accepted_out_cache_loc(
    accept_index: torch.Tensor, out_cache_loc: torch.Tensor, accepted_out_cache_loc: torch.Tensor
) -> None:
    """Pack the slots of the accepted nodes: the k-th that is not -1, in flat order, at place k.

    One launch on the current stream; never synchronises, may be captured. Every 1024 entries are
    counted by a program that first counts all entries before them: cheap for what a batch has, and
    still short for a million. Places past the last node's are left as they are: zeros there make
    ``move_kv_cache`` move the dummy slot onto itself.

    Args:
        accept_index: Row of each accepted node, negative for none.
        out_cache_loc: Slots of this step's rows. A row outside it leaves its place as it is.
        accepted_out_cache_loc: Gets the slots.

    Shapes:
        accept_index: any shape, int32 or int64. out_cache_loc: [T] int64 (or int32).
        accepted_out_cache_loc: [N], any N, contiguous int64 (or int32).

    Raises:
        InputError: A shape, dtype or device does not fit.
    """
    entries = accept_index.flatten()
    _FILL.check(entries, out_cache_loc, accepted_out_cache_loc)
    places = torch.arange(accepted_out_cache_loc.numel(), device=entries.device)
    if entries.numel() == 0:
        return
    counted = (entries >= 0).cumsum(0)
    at = torch.searchsorted(counted, places + 1)
    row = read(entries, (at,), torch.full_like(places, -1))
    accepted_out_cache_loc.copy_(read(out_cache_loc, (row,), accepted_out_cache_loc))


@fill_accepted_out_cache_loc.register_fake
def _(*_: object) -> None:
    """Nothing is returned, so there is no shape to tell."""


@fill_accepted_out_cache_loc.register_kernel("cuda")
def _(accept_index: torch.Tensor, *slots: Any) -> None:
    from graphkit.ops.kernels.accepted_path import launch_fill_accepted_out_cache_loc

    entries = accept_index.flatten()
    _FILL.check(entries, *slots)
    with torch.cuda.device(entries.device):
        launch_fill_accepted_out_cache_loc(entries, *slots)
