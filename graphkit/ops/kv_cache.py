"""Rows of a KV cache: the write of new ones, and the move of rows to other slots.

Dimensions: T tokens, M key-value heads, D head size of keys, E head size of values.
"""

# ruff: noqa: N803 - suffixes of tensor names are dimensions
from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import torch

from graphkit.errors import AttentionError
from graphkit.ops.argument_rules import describe
from graphkit.ops.attention_layout import has_dense_rows
from graphkit.ops.registration import register_op

FP8 = torch.float8_e4m3fn
LARGEST_FP8 = torch.finfo(FP8).max


def check_caches(op: str, args: Any) -> None:
    """Check the caches that an op writes, and their scales.

    Args:
        op: Name of the op, for messages.
        args: Its arguments, with the names of those of ``store_kv``.

    Raises:
        AttentionError: The caches differ in their dtype or have spaced rows, or have scales without
            being of float8_e4m3fn.
    """
    caches = (args.key_cache, args.value_cache)
    if not all(map(has_dense_rows, caches)) or caches[0].dtype != caches[1].dtype:
        raise AttentionError(
            f"{op}: the caches are {describe(caches[0])} and {describe(caches[1])}, expected "
            "one dtype and contiguous memory within each slot. Pass one layer's buffers."
        )
    has_scale = args.key_scale_M is not None or args.value_scale_M is not None
    if has_scale and caches[0].dtype != FP8:
        raise AttentionError(
            f"{op}: scales are for a cache of float8_e4m3fn, but it holds {caches[0].dtype}. "
            "Pass None."
        )


def _check_rows(args: Any) -> None:
    """Refuse caches that cannot be written, and rows that cannot be converted."""
    check_caches("store_kv", args)
    dtype = args.key_cache.dtype
    for name, rows in (("key_TMD", args.key_TMD), ("value_TMD", args.value_TMD)):
        is_floating = rows.is_floating_point() and dtype.is_floating_point
        if not is_floating and rows.dtype != dtype:
            raise AttentionError(
                f"store_kv: {name} is {describe(rows)}, but the cache holds {dtype}. "
                "Pass that dtype, or floating-point rows for a floating-point cache."
            )


@register_op(
    mutates_args=("key_cache", "value_cache"),
    check=_check_rows,
    sizes_from=("key_cache", "value_cache", "loc_T"),
    error=AttentionError,
)
def store_kv(
    key_cache: Annotated[torch.Tensor, "[slots, M, D]"],
    value_cache: Annotated[torch.Tensor, "[slots, M, E]"],
    loc_T: Annotated[torch.Tensor, "[T] int64"],
    key_TMD: Annotated[torch.Tensor, "[T, M, D]"],
    value_TMD: Annotated[torch.Tensor, "[T, M, E]"],
    key_scale_M: Annotated[torch.Tensor | None, "[M] float32"] = None,
    value_scale_M: Annotated[torch.Tensor | None, "[M] float32"] = None,
) -> None:
    """Write row t of ``key_TMD`` and ``value_TMD`` into slot ``loc_T[t]``, in the cache's dtype.

    The caches may be two parts of one buffer whose rows hold a key and a value side by side. Only
    the dummy slot 0 may occur more than once; it keeps any one of its rows. A slot outside the
    cache raises IndexError on the CPU. On CUDA its row is dropped, since the op does not wait for
    the device.

    Args:
        key_cache: Keys of one layer, each slot contiguous.
        value_cache: Values of the layer in the dtype of key_cache, each slot contiguous.
        loc_T: Slot of each token.
        key_TMD: Keys to write: of any floating-point dtype for a floating-point cache, else of the
            cache's dtype.
        value_TMD: Values to write, as key_TMD.
        key_scale_M: Divides the keys of each head before they are stored; None for 1. Only for a
            cache of float8_e4m3fn. Its largest number is 448: larger magnitudes become 448.
        value_scale_M: Divides the values, as key_scale_M.
    """
    _write(key_cache, loc_T, key_TMD, key_scale_M)
    _write(value_cache, loc_T, value_TMD, value_scale_M)


def _write(
    cache: torch.Tensor, loc: torch.Tensor, rows: torch.Tensor, scale: torch.Tensor | None
) -> None:
    """Write rows into the slots of one cache, divided by the scale of each head."""
    if cache.dtype != FP8:
        cache.index_copy_(0, loc, rows.to(cache.dtype))
        return
    wide = rows.float() if scale is None else rows.float() / scale[:, None]
    stored = wide.clamp(-LARGEST_FP8, LARGEST_FP8).to(FP8)
    # The CPU copies no float8 by index, but bytes.
    cache.view(torch.uint8).index_copy_(0, loc, stored.view(torch.uint8))


def buffer_table(buffers: Sequence[torch.Tensor]) -> torch.Tensor:
    """Describe the buffers for the CUDA kernel, int64 [buffers, 3] on their device.

    A row holds a buffer's address, the bytes of one of its rows, and the bytes of one row of all
    buffers before it. Waits for its copy to the device: call it once, after allocating the buffers.
    """
    lines, before = [], 0
    for buffer in buffers:
        lines.append([buffer.data_ptr(), buffer[0].nbytes, before])
        before += buffer[0].nbytes
    return torch.tensor(lines, dtype=torch.int64, device=buffers[0].device)


def _check_buffers(args: Any) -> None:
    """Refuse buffers that differ in slots or device, and a table that is not theirs."""
    buffers, table = args.buffers, args.table
    if args.src_loc.shape != args.tgt_loc.shape:
        raise AttentionError(
            f"move_kv: tgt_loc is {describe(args.tgt_loc)} and src_loc is "
            f"{describe(args.src_loc)}, expected one shape, a slot per row to move."
        )
    if table.shape[0] != len(buffers):
        raise AttentionError(
            f"move_kv: table is {describe(table)}, expected [{len(buffers)}, 3]. Pass the "
            "buffer_table of the same buffers."
        )
    for buffer in buffers:
        is_first_shape = buffer.shape[:1] == buffers[0].shape[:1]
        if not (is_first_shape and buffer.is_contiguous() and buffer.device == table.device):
            raise AttentionError(
                f"move_kv: a buffer is {describe(buffer)}, expected contiguous buffers of "
                f"{list(buffers[0].shape[:1])} slots on {table.device}. Pass all buffers of one "
                "pool."
            )


@register_op(mutates_args=("buffers",), check=_check_buffers, error=AttentionError)
def move_kv(
    buffers: Sequence[torch.Tensor],
    table: Annotated[torch.Tensor, "[buffers, 3] int64"],  # noqa: ARG001 - for the CUDA kernel
    tgt_loc: Annotated[torch.Tensor, "[...] int64"],
    src_loc: Annotated[torch.Tensor, "[...] int64"],
) -> None:
    """Copy row ``src_loc[n]`` of every buffer to its row ``tgt_loc[n]``, for all n at once.

    Every source is read before any target is written, so both may name the same slots, as in
    [1, 2, 3] to [2, 3, 4]. A slot is a target at most once, except slot 0 as its own source: such
    pairs are padding. A slot outside the buffers is an error on the CPU; on CUDA its pair moves
    nothing, since the op does not wait for the device.

    Two launches for any number of buffers. Allocates a temporary copy of the rows.

    Args:
        buffers: Buffers of all layers, each [slots, ...] of any dtype, contiguous.
        table: ``buffer_table`` of the same buffers.
        tgt_loc: Slots to write. On the CPU an AttentionError names one that is out of range.
        src_loc: Slots to read; of the shape of tgt_loc.
    """
    if not buffers:
        return
    tgt_loc, src_loc = tgt_loc.flatten(), src_loc.flatten()
    slots = buffers[0].shape[0]
    for name, loc in (("tgt_loc", tgt_loc), ("src_loc", src_loc)):
        outside = loc[(loc < 0) | (loc >= slots)].tolist()
        if outside:
            raise AttentionError(
                f"move_kv: {name} has slot {outside[0]}, expected slots 0 to {slots - 1}."
            )
    for buffer in buffers:
        buffer.index_copy_(0, tgt_loc, buffer[src_loc])
