"""Move of rows of a KV cache to other slots, in every layer at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import torch

from graphkit.errors import AttentionError
from graphkit.ops.argument_rules import describe
from graphkit.ops.registration import register_op


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


def _check(given: Any) -> None:
    """Refuse buffers that differ in slots or device, and a table that is not theirs."""
    buffers, table = given.buffers, given.table
    if given.src_loc.shape != given.tgt_loc.shape:
        raise AttentionError(
            f"move_kv: tgt_loc is {describe(given.tgt_loc)} and src_loc is "
            f"{describe(given.src_loc)}, expected one shape, a slot per row to move."
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


@register_op(mutates_args=("buffers",), check=_check, error=AttentionError)
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
