"""How the torch references read and write ragged rows without shapes that depend on the data.

Packed: rows of different lengths, one after the other without gaps. Suffix: N places of the packed
tensor.
"""

# ruff: noqa: N806 - tensor suffixes are the house's notation
from __future__ import annotations

import torch


def find_places(
    lengths: torch.Tensor, places: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Say whose each of the first ``places`` places of a packed tensor is.

    Returns:
        The row, the column within it, and whether the place is anybody's: past the last row's end
        it is not, and its row and column are only good for reading.

    Shapes:
        lengths: [B] integer, B >= 1; one below 0 counts as 0.
        Returns [N] int64, [N] int64 and [N] bool.
    """
    lengths = lengths.clamp(min=0)
    ends = lengths.cumsum(0)
    place_N = torch.arange(places, device=lengths.device)
    row_N = torch.searchsorted(ends, place_N, right=True)
    is_used_N = row_N < ends.numel()
    row_N = row_N.clamp(max=ends.numel() - 1)
    return row_N, place_N - (ends - lengths)[row_N], is_used_N


def read(
    source: torch.Tensor,
    index: tuple[torch.Tensor, ...],
    other: torch.Tensor,
    wanted: torch.Tensor | bool = True,
) -> torch.Tensor:
    """``source[index]`` where that is wanted and exists, else ``other``, whose dtype it gets."""
    known = _within(source, index) & wanted
    if source.numel() == 0:
        return other.expand(known.shape).clone()
    safe = tuple(torch.where(known, each, 0) for each in index)
    return torch.where(known, source[safe].to(other.dtype), other)


def write(
    target: torch.Tensor,
    index: tuple[torch.Tensor, ...],
    values: torch.Tensor,
    wanted: torch.Tensor | bool = True,
) -> None:
    """``target[index] = values`` where that is wanted and exists.

    What is not is written over itself at the first place of all, which must not be wanted as well:
    in ``req_to_token`` it is the pads'.
    """
    known = _within(target, index) & wanted
    if target.numel() == 0:
        return
    safe = tuple(torch.where(known, each, 0) for each in index)
    target[safe] = torch.where(known, values.to(target.dtype), target.flatten()[0])


def _within(tensor: torch.Tensor, index: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Whether each index lies in the tensor; a negative one does not."""
    inside = [(each >= 0) & (each < size) for each, size in zip(index, tensor.shape, strict=True)]
    return torch.stack(torch.broadcast_tensors(*inside)).all(0)
