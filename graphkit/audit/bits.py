"""Bits of tensors: whether they are equal, where they differ first, and sums that depend on all."""

from __future__ import annotations

import torch

CHUNK = 1 << 20
"""Bytes that have one sum."""
_WORDS = CHUNK // 8
_BATCH = 256
"""Chunks that are summed at once, which bounds the temporary memory to 256 MiB."""


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a strided tensor in the order of its elements, uint8 [n]."""
    dense = tensor.detach().contiguous()  # of one element it may still have any stride
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have the same shape and dtype, and the same bits."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(as_bytes(one), as_bytes(other))


def first_difference_in_bits(one: torch.Tensor, other: torch.Tensor) -> int | None:
    """Return the index of the first element that differs in any bit, in the order of elements.

    Both tensors have the same shape and dtype. ``None`` if no element differs.
    """
    rows = [as_bytes(tensor).view(-1, tensor.element_size()) for tensor in (one, other)]
    if torch.equal(*rows):
        return None
    return int((rows[0] != rows[1]).any(1).nonzero()[0])


def checksum(tensor: torch.Tensor) -> int:
    """Return a number that depends on every bit of a strided tensor and on its position."""
    data = as_bytes(tensor)
    return hash((len(data), *chunk_sums(data).tolist()))


def chunk_sums(data: torch.Tensor) -> torch.Tensor:
    """Return a number for each chunk that depends on its bytes and on their order.

    Args:
        data: uint8 [n], contiguous.

    Returns:
        int64 [ceil(n / CHUNK)], zero for chunks of zeros.
    """
    if data.storage_offset() % 8:  # it cannot be read as words
        data = data.clone()
    odd = torch.arange(1, 1 + 2 * min(_WORDS, -(-len(data) // 8)), 2, device=data.device)
    whole = len(data) // CHUNK
    sums = torch.zeros(-(-len(data) // CHUNK), dtype=torch.int64, device=data.device)
    grid = data[: whole * CHUNK].view(torch.int64).view(whole, _WORDS)
    for at in range(0, whole, _BATCH):
        end = min(at + _BATCH, whole)
        sums[at:end] = (grid[at:end] * odd).sum(1)
    rest = data[whole * CHUNK :]
    if len(rest):
        padded = torch.zeros(-(-len(rest) // 8) * 8, dtype=torch.uint8, device=data.device)
        padded[: len(rest)] = rest
        words = padded.view(torch.int64)
        sums[whole] = (words * odd[: len(words)]).sum()
    return sums
