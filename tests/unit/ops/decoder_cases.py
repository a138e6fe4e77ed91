"""Arguments of the ops of decoder layers, for the CPU, the interpreter and CUDA."""

from __future__ import annotations

from itertools import islice, product

import torch

from graphkit.ops.decoder import add_rms_norm, embed_and_join, rms_norm, silu_and_mul
from graphkit.ops.heads import rotated_heads
from graphkit.ops.kv_cache import FP8

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
IDS = (torch.int32, torch.int64)
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
        both = random(rows, 2 * width, dtype=dtype)
        yield add_rms_norm, (x, both[:, width:], weight, 1e-5)  # a view with spaced rows
    for dtype, rows, width in product(DTYPES, (0, 1, 3, 8), (24, 64, 96, 2304)):
        found = torch.randint(0, 7, (rows,), generator=generator).to(IDS[rows % 2]).to(device)
        embedding, hidden = random(7, width, dtype=dtype), random(rows, width, dtype=dtype)
        norms = random(2, width, dtype=dtype).unbind()
        yield embed_and_join, (found, embedding, hidden, *norms, 1e-5)
        yield embed_and_join, (found, embedding.t().contiguous().t(), hidden, norms[0], None, 1e-6)
        yield embed_and_join, (found, embedding, hidden)
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


STORES = [
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.float32, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.bfloat16, FP8),
    (torch.float32, FP8),
]
"""Dtypes of rows and of caches."""


def store_cases(device, *, outside, every=1):
    """Yield the caches, slots, scales and arguments of ``rotated_heads`` of a store.

    Args:
        device: Device of the tensors.
        outside: Whether some slots are outside of the caches, which the CPU refuses.
        every: Step through the combinations of dtypes and head size. 2 takes every second one: the
            interpreter needs a second for each.
    """
    generator = torch.Generator().manual_seed(4)

    def random(*shape, dtype):
        return torch.randn(shape, generator=generator).to(dtype).to(device)

    sizes = (2, 24, 80, 96, 128)
    for (dtype, stored), size in islice(product(STORES, sizes), None, None, every):
        for rows, heads, keys in ((0, 3, 1), (1, 4, 4), (6, 6, 2), (5, 0, 3)):
            has_norm, has_parts, is_joined = size not in (24, 128), size != 96, size == 80
            shape = rows, (heads + 2 * keys) * size
            qkv = random(*(2, *shape) if has_parts else shape, dtype=dtype)
            qkv = 3 * qkv.to(torch.float32 if has_parts else dtype)
            positions = torch.randint(0, 100_000, (rows,), generator=generator).to(device)
            frequencies = 1.0 / 10000 ** (torch.arange(0, size, 2, device=device) / size)
            weights = (None, None)
            if has_norm:
                weights = random(size, dtype=dtype), random(size, dtype=dtype)
            rotation = (qkv, positions, frequencies, heads, keys, *weights, 1e-6, dtype)
            caches = [torch.zeros(11, keys, size, dtype=stored, device=device) for _ in "kv"]
            if is_joined:  # two parts of a buffer
                buffer = torch.zeros(11, 1, 2 * keys * size, dtype=stored, device=device)
                caches = [each.unflatten(2, (keys, size))[:, 0] for each in buffer.chunk(2, 2)]
            slots = torch.tensor([7, 0, 10, 3, 2, 5], device=device)[:rows]
            if outside and rows > 3:
                slots[1], slots[3] = -1, 11
            scales = [None, None]
            if stored == FP8 and size != 128:
                scales = [random(keys, dtype=torch.float32).abs() + 0.1 for _ in "kv"]
            yield caches, slots, scales, rotation


def copies(caches):
    """Return caches of the same layout with the same contents."""
    found = [torch.empty_strided(each.shape, each.stride(), dtype=each.dtype) for each in caches]
    return [one.to(other.device).copy_(other) for one, other in zip(found, caches, strict=True)]


def assert_close(got, expected):
    """Compare results of equal dtypes and shapes up to a few roundings."""
    both = (each if isinstance(each, tuple) else (each,) for each in (got, expected))
    for one, other in zip(*both, strict=True):
        eps = torch.finfo(other.dtype).eps
        torch.testing.assert_close(one, other, rtol=ROUNDINGS * eps, atol=ROUNDINGS * eps)
