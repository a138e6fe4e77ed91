"""Whether memory of two graphs is further apart than rounding takes it.

Matrix products that add up in changing order, with atomics, never leave the same bits twice. A node
that makes something else is told from them by how far off it is.
"""

from __future__ import annotations

import torch

_BLOCK_BYTES = 512
"""torch's allocator gives every tensor a whole number of these."""
_SMALLEST = 1e-30
"""As float32, whole numbers and flags are smaller: those must be equal."""
_ROUNDINGS = {4: 64, 2: 4}
"""Of a sum of many products kept in so many bytes; in two it is rounded at the end alone."""


def is_beyond_rounding(one: torch.Tensor, two: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether any number differs by more than sums in another order do.

    What lies where in a pool is unknown. So words of four bytes are near if they are as numbers of
    the model's dtype, beside the largest number of their block. A bfloat16 model's may be float32,
    which begin with the same bits.

    Args:
        one: Bytes, whole blocks of the allocator.
        two: As many.
        dtype: The model's, of at most four bytes.
    """
    near = (one == two).view(-1, 4).all(1)
    allowed = _ROUNDINGS[dtype.itemsize] * torch.finfo(dtype).eps
    for each in {dtype, torch.float32 if dtype == torch.bfloat16 else dtype}:
        near |= _are_near(one, two, each, allowed)
    return not bool(near.all())


def _are_near(
    one: torch.Tensor, two: torch.Tensor, dtype: torch.dtype, allowed: float
) -> torch.Tensor:
    """Of every word of four bytes."""
    numbers = _BLOCK_BYTES // dtype.itemsize
    a, b = (each.view(dtype).float().view(-1, numbers) for each in (one, two))
    largest = torch.where(a.isfinite(), a.abs(), 0.0).amax(1, keepdim=True)
    near = ((a - b).abs() <= allowed * largest) & (largest > _SMALLEST)
    return near.view(-1, 4 // dtype.itemsize).all(1)
