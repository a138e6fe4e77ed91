"""Reads and writes of packed rows for the torch references, in static shapes.

Packed rows have different lengths and follow one another without gaps. Suffix: N entries of the
packed tensor.
"""

# ruff: noqa: N806 - suffixes of tensor names are dimensions
from __future__ import annotations

import torch


def locate(lengths: torch.Tensor, entries: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return row and column of each of the first ``entries`` entries of a packed tensor.

    Returns:
        The row, the column within it, and whether the entry belongs to a row. Behind the end of
        the last row it does not, and row and column are only safe to read at.

    Shapes:
        lengths: [B] integer, B >= 1; a negative length counts as 0.
        Returns [N] int64, [N] int64 and [N] bool.
    """
    lengths = lengths.clamp(min=0)
    ends = lengths.cumsum(0)
    entry_N = torch.arange(entries, device=lengths.device)
    row_N = torch.searchsorted(ends, entry_N, right=True)
    is_used_N = row_N < ends.numel()
    row_N = row_N.clamp(max=ends.numel() - 1)
    return row_N, entry_N - (ends - lengths)[row_N], is_used_N


def read(
    source: torch.Tensor,
    index: tuple[torch.Tensor, ...],
    default: torch.Tensor,
    wanted: torch.Tensor | bool = True,
) -> torch.Tensor:
    """Return ``source[index]`` where it is wanted and in range, else ``default``, in its dtype."""
    known = _is_inside(source, index) & wanted
    if source.numel() == 0:
        return default.expand(known.shape).clone()
    safe = tuple(torch.where(known, axis, 0) for axis in index)
    return torch.where(known, source[safe].to(default.dtype), default)


def write(
    target: torch.Tensor,
    index: tuple[torch.Tensor, ...],
    values: torch.Tensor,
    wanted: torch.Tensor | bool = True,
) -> None:
    """Set ``target[index] = values`` where it is wanted and in range; ``target`` is contiguous.

    A write that is skipped repeats the first one that is not, since shapes are static.
    """
    if target.numel() == 0:
        return
    known = _is_inside(target, index) & wanted
    if known.numel() == 0:
        return
    flat, position = target.view(-1), torch.zeros_like(known, dtype=torch.int64)
    for axis, stride in zip(index, target.stride(), strict=True):
        position = position + axis * stride
    first = known.int().argmax()
    is_any = known.any()
    spare_position = torch.where(is_any, position[first], 0)
    spare_value = torch.where(is_any, values[first].to(flat.dtype), flat[0])
    values = torch.where(known, values.to(flat.dtype), spare_value)
    flat[torch.where(known, position, spare_position)] = values


def _is_inside(tensor: torch.Tensor, index: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Return whether each index is in range; a negative one is not."""
    inside = [(axis >= 0) & (axis < size) for axis, size in zip(index, tensor.shape, strict=True)]
    return torch.stack(torch.broadcast_tensors(*inside)).all(0)
