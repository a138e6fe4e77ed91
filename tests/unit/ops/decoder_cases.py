"""Arguments of the ops of decoder layers, for the CPU, the interpreter and CUDA."""

from __future__ import annotations

from itertools import product

import torch

from graphkit.ops.decoder import add_rms_norm, rms_norm, rotated_heads, silu_and_mul

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROUNDINGS = 4
"""Roundings of the dtype by which a kernel may differ: sums run in another order."""


def cases(device):
    """Yield ops and arguments: no, one and several rows; widths that are no powers of two."""
    generator = torch.Generator().manual_seed(1)

    def random(*shape, dtype):
        return torch.randn(shape, generator=generator).to(dtype).to(device)

    for dtype, rows, width in product(DTYPES, (0, 1, 5), (1, 24, 200)):
        x, residual, weight = (
            random(*shape, dtype=dtype) for shape in ((rows, width), (rows, width), (width,))
        )
        yield rms_norm, (x, weight, 1e-6)
        yield add_rms_norm, (x, residual, weight, 1e-5)
        parts = random(3, rows, width, dtype=torch.float32)
        yield add_rms_norm, (parts, residual, weight, 1e-5)
        yield silu_and_mul, (3 * random(rows, 2 * width, dtype=dtype),)
    for dtype, rows, half, has_norm in product(DTYPES, (0, 1, 5), (1, 12, 64), (False, True)):
        frequencies = 1.0 / 10000 ** (torch.arange(half, device=device) / half)
        positions = torch.randint(0, 100_000, (rows,), generator=generator).to(device)
        norms = (None, None, 0.0)
        if has_norm:
            norms = (random(2 * half, dtype=dtype), random(2 * half, dtype=dtype), 1e-6)
        qkv = random(rows, 14 * half, dtype=dtype)
        yield rotated_heads, (qkv, positions, frequencies, 3, 2, *norms)
        parts = random(2, rows, 14 * half, dtype=torch.float32)
        yield rotated_heads, (parts, positions, frequencies, 3, 2, *norms, dtype)


def assert_close(got, expected):
    """Compare results of equal dtypes and shapes up to a few roundings."""
    both = (each if isinstance(each, tuple) else (each,) for each in (got, expected))
    for one, other in zip(*both, strict=True):
        eps = torch.finfo(other.dtype).eps
        torch.testing.assert_close(one, other, rtol=ROUNDINGS * eps, atol=ROUNDINGS * eps)
