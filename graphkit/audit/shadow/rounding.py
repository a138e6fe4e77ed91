"""Comparison of raw memory of two graphs, up to rounding.

Matrix products that add in changing order, with atomics, leave different bits each time. A
difference beyond rounding shows that a node computes something else.
"""

from __future__ import annotations

import torch

_BLOCK_BYTES = 512
"""torch's allocator gives every tensor a multiple of this."""
_SMALLEST = 1e-30
"""Integers and flags, read as float32, are smaller; they must be equal."""
_ROUNDINGS = {4: 64, 2: 4}
"""Rounding errors of a sum of products by item size. In two bytes only the result is rounded."""


def is_beyond_rounding(one: torch.Tensor, two: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether any number differs by more than sums in a different order do.

    The dtype of memory in a pool is unknown. So a word of four bytes is close if its numbers are,
    read in the model's dtype, relative to the largest number of the block. With bfloat16 it may
    also be read as float32.

    Args:
        one: Bytes; whole blocks of the allocator.
        two: As many bytes.
        dtype: The model's dtype, of at most four bytes.
    """
    close = (one == two).view(-1, 4).all(1)
    allowed = _ROUNDINGS[dtype.itemsize] * torch.finfo(dtype).eps
    for each in {dtype, torch.float32 if dtype == torch.bfloat16 else dtype}:
        close |= _close_words(one, two, each, allowed)
    return not bool(close.all())


def _close_words(
    one: torch.Tensor, two: torch.Tensor, dtype: torch.dtype, allowed: float
) -> torch.Tensor:
    """Return for each word of four bytes whether all its numbers are close, bool [words]."""
    numbers = _BLOCK_BYTES // dtype.itemsize
    a, b = (each.view(dtype).float().view(-1, numbers) for each in (one, two))
    largest = torch.where(a.isfinite(), a.abs(), 0.0).amax(1, keepdim=True)
    close = ((a - b).abs() <= allowed * largest) & (largest > _SMALLEST)
    return close.view(-1, 4 // dtype.itemsize).all(1)
