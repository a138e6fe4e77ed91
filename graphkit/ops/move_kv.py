"""Move rows of a KV cache to other slots, in every layer at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graphkit.errors import AttentionError


def buffer_table(buffers: Sequence[torch.Tensor]) -> torch.Tensor:
    """What the CUDA kernel knows of the buffers, int64 [buffers, 3] on their device.

    A line is a buffer's address, the bytes of one of its rows, and the bytes of a row of all
    buffers before it. Waits for its copy to the device: make it once, when the buffers are made.
    """
    lines, before = [], 0
    for buffer in buffers:
        lines.append([buffer.data_ptr(), buffer[0].nbytes, before])
        before += buffer[0].nbytes
    return torch.tensor(lines, dtype=torch.int64, device=buffers[0].device)


@torch.library.custom_op("graphkit::move_kv", mutates_args=("buffers",), device_types="cpu")
def move_kv(
    buffers: Sequence[torch.Tensor],
    table: torch.Tensor,
    tgt_loc: torch.Tensor,
    src_loc: torch.Tensor,
) -> None:
    """Copy row ``src_loc[n]`` of every buffer to its row ``tgt_loc[n]``, for all n at once.

    Every source is read before any target is written, so both may name the same slots, as in
    [1, 2, 3] to [2, 3, 4]. A slot comes at most once as a target, except slot 0 as its own source:
    such pairs are padding.

    Two launches on the current stream, however many buffers there are; never synchronises, may be
    captured. Rows wait in a scratch of as many bytes as they have. A slot outside the buffers is an
    error on the CPU; on CUDA, where nobody could wait for the answer, its pair moves nothing.

    Args:
        buffers: Each layer's buffers.
        table: ``buffer_table`` of the very same buffers.
        tgt_loc: Slots to write.
        src_loc: Slots to read.

    Shapes:
        buffers[i]: [slots, ...], contiguous, any dtype. table: [len(buffers), 3] int64.
        tgt_loc, src_loc: one shape, int64.

    Raises:
        AttentionError: A shape, dtype or device does not fit, or, on the CPU, a slot.
    """
    _check(buffers, table, tgt_loc, src_loc)
    if not buffers:
        return
    tgt_loc, src_loc = tgt_loc.flatten(), src_loc.flatten()
    slots = buffers[0].shape[0]
    for name, loc in (("tgt_loc", tgt_loc), ("src_loc", src_loc)):
        outside = loc[(loc < 0) | (loc >= slots)].tolist()
        if outside:
            _refuse(f"{name} of slot {outside[0]}", f"there are slots 0 to {slots - 1}")
    for buffer in buffers:
        buffer.index_copy_(0, tgt_loc, buffer[src_loc])


@move_kv.register_fake
def _(*_: object) -> None:
    """Nothing is returned, so there is no shape to tell."""


@move_kv.register_kernel("cuda")
def _(
    buffers: Sequence[torch.Tensor],
    table: torch.Tensor,
    tgt_loc: torch.Tensor,
    src_loc: torch.Tensor,
) -> None:
    from graphkit.ops.kernels.move_kv import launch_move_kv

    _check(buffers, table, tgt_loc, src_loc)
    with torch.cuda.device(tgt_loc.device):
        launch_move_kv(buffers, table, tgt_loc, src_loc)


def _check(
    buffers: Sequence[torch.Tensor],
    table: torch.Tensor,
    tgt_loc: torch.Tensor,
    src_loc: torch.Tensor,
) -> None:
    for buffer in buffers:
        if not buffer.is_contiguous() or buffer.shape[:1] != buffers[0].shape[:1]:
            _refuse(f"a buffer of {list(buffer.shape)}", "make all contiguous, of as many slots")
    for loc in (tgt_loc, src_loc):
        if loc.dtype != torch.int64 or loc.shape != tgt_loc.shape:
            came = f"tgt_loc of {_say(tgt_loc)} and src_loc of {_say(src_loc)}"
            _refuse(came, "both must be torch.int64 and of one shape, a slot per row to move")
    if list(table.shape) != [len(buffers), 3] or table.dtype != torch.int64:
        _refuse(f"table of {_say(table)}", "it must be the buffer_table of the buffers")
    devices = {str(tensor.device) for tensor in (*buffers, table, tgt_loc, src_loc)}
    if len(devices) > 1:
        _refuse(f"tensors on {sorted(devices)}", "move all of them to one device")


def _say(tensor: torch.Tensor) -> str:
    return f"{list(tensor.shape)} {tensor.dtype}"


def _refuse(came: str, advice: str) -> None:
    raise AttentionError(f"move_kv got {came}: {advice}.")
