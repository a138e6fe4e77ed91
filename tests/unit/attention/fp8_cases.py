"""Rows, caches of float8_e4m3fn and scales, for the CPU, the interpreter and CUDA."""

from __future__ import annotations

import torch

FP8 = torch.float8_e4m3fn
SCALES = {
    "none": lambda _: None,
    "tensor": lambda heads: torch.full((heads,), 0.5),
    "heads": lambda heads: 2.0 ** torch.arange(-2, heads - 2),
}


def rows(heads=3, head_dim=40, tokens=5, dtype=torch.float32, device="cpu"):
    """Return keys and values, and their slots."""
    generator = torch.Generator().manual_seed(0)
    made = [
        (4 * torch.randn(tokens, heads, head_dim, generator=generator)).to(dtype).to(device)
        for _ in "kv"
    ]
    made[0][0, 0, 0] = 1e4  # ends at the largest number
    return *made, (torch.arange(tokens) * 3 % 11 + 1).to(device)


def caches(heads=3, head_dim=40, slots=12, device="cpu"):
    return [torch.zeros(slots, heads, head_dim, device=device).to(FP8) for _ in "kv"]


def attention_args(kind, *, dtype=torch.float32, tree=False, window=0, device="cpu"):
    """Return arguments of ``paged_attention`` over caches of float8_e4m3fn.

    Two requests of 9 and 3 keys have two query rows each, with two query heads per key head.
    """
    generator = torch.Generator().manual_seed(1)
    heads, head_dim, slots = 2, 32, 24
    scale = SCALES[kind](heads)
    scales = [None if scale is None else (scale + shift).to(device) for shift in (0, 0.5)]
    stored = [
        torch.randn(slots, heads, head_dim, generator=generator).to(FP8).to(device) for _ in "kv"
    ]
    query = torch.randn(4, 2 * heads, head_dim, generator=generator).to(dtype).to(device)
    table = torch.stack([torch.arange(1, 11), torch.arange(11, 21)]).int().to(device)
    mask = torch.tensor([[[True, False], [False, True]]] * 2, device=device) if tree else None
    lengths = torch.tensor([9, 3], dtype=torch.int32, device=device)
    sums = torch.tensor([0, 2, 4], dtype=torch.int32, device=device)
    numbers = head_dim**-0.5, 1, 2, window, 0.0
    return query, *stored, table, lengths, sums, mask, *numbers, None, *scales


def wide_args(dtype, *, head_dim, width, tree, exponent, page_size=16, device="cpu"):
    """Return arguments of ``paged_attention`` with all 254 numbers in both caches.

    Three requests of 300, 70 and 16 keys, with four query heads per key head. The queries have a
    factor of 2**exponent, which the scale of the scores divides out.
    """
    generator = torch.Generator().manual_seed(head_dim + width)
    lengths, heads = (300, 70, 16), 2
    pages = [-(-length // page_size) for length in lengths]
    slots = (sum(pages) + 1) * page_size
    stored = []
    for spread in (16.0, 1.0):  # large keys would leave one key per row
        codes = torch.randint(0, 254, (slots, heads, head_dim), generator=generator)
        codes += (codes >= 0x7F).int()  # NaN is 0x7F and 0xFF
        cache = codes.to(torch.uint8).view(FP8).float() / spread
        stored.append(cache.to(FP8).to(device))
    stored[1].view(torch.uint8)[:, :, ::2] ^= 0x80
    query = torch.randn(3 * width, 4 * heads, head_dim, generator=generator).to(dtype)
    table = torch.zeros(3, max(pages), dtype=torch.int32)
    order = (torch.randperm(sum(pages), generator=generator) + 1).int().split(pages)
    for request, own in enumerate(order):
        table[request, : len(own)] = own
    mask = torch.eye(width, dtype=torch.bool).repeat(3, 1, 1) if tree else None
    ints = [table, torch.tensor(lengths).int(), (torch.arange(4) * width).int(), mask]
    ints = [None if each is None else each.to(device) for each in ints]
    scale = head_dim**-0.5 / 16 * 2.0**-exponent
    return (query * 2.0**exponent).to(device), *stored, *ints, scale, page_size, width


def dequantised(args):
    """Return the same arguments over caches of float32 without scales."""
    query, key, value, *rest, key_scale, value_scale = args
    wide = [
        cache.float() * (1.0 if scale is None else scale[:, None])
        for cache, scale in ((key, key_scale), (value, value_scale))
    ]
    return query, *wide, *rest, None, None
