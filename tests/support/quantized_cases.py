"""Arguments of ``quantized_linear`` and ``linear``, for the CPU, the interpreter and CUDA."""

from __future__ import annotations

from itertools import product

import torch

import tensor_cores
from graphkit.ops.quantized_layout import BLOCK, dequantized, packed_numbers

ROUNDINGS = 4
"""Roundings of the dtype by which a kernel may differ: sums run in another order."""
SHAPES = ((16, 128), (40, 72), (130, 200), (1, 1), (264, 384))
"""Outputs and inputs; most are no multiples of a tile."""


def cells(size):
    return (size + 127) // 128


def weights(device, shapes=SHAPES, seed=1):
    """Yield quantised weights of all layouts: name, numbers, scales and zero points."""
    generator = torch.Generator().manual_seed(seed)

    def positive(*shape):
        return (torch.rand(shape, generator=generator) + 0.1).to(device)

    for outputs, inputs in shapes:
        numbers = torch.randn(outputs, inputs, generator=generator).to(torch.float8_e4m3fn)
        scales = {"tensor": (1, 1), "channel": (outputs, 1)}
        scales |= {"blocks": (cells(outputs), cells(inputs)), "rows": (outputs, cells(inputs))}
        for kind, shape in scales.items():
            yield f"fp8 {kind}", numbers.to(device), positive(*shape), None, inputs
        nibbles = torch.randint(16, (outputs, inputs), generator=generator, dtype=torch.uint8)
        for columns in {1, cells(inputs)}:
            zeros = torch.randint(16, (outputs, columns), generator=generator, dtype=torch.uint8)
            packed = packed_numbers(nibbles).to(device)
            scale = positive(outputs, columns).to(torch.bfloat16)
            yield "int4 symmetric", packed, scale, None, inputs
            yield "int4 asymmetric", packed, scale, zeros.to(device), inputs


def cases(device, dtypes, rows=(0, 1, 3, 64), shapes=SHAPES):
    """Yield the arguments of calls, with and without bias."""
    generator = torch.Generator().manual_seed(2)
    for dtype, count in product(dtypes, rows):
        for number, (_, weight, scale, zero_point, inputs) in enumerate(weights(device, shapes)):
            x = torch.randn(count, inputs, generator=generator).to(dtype).to(device)
            bias = torch.randn(len(weight), generator=generator).to(dtype).to(device)
            yield x, weight, scale, zero_point, bias if number % 2 else None


def parts_in_order(x, weight, scale, zero_point, bias, splits, sums):
    """Return the sums of the parts of ``quantized_linear``, [S, T, N], with the bits of a kernel.

    Args:
        x: See ``quantized_linear``, like the next.
        splits: Parts of the inputs, of whole lines.
        sums: Sums of a part, of which each has every ``sums``-th line.
    """
    inputs, blocks_of_line = x.shape[1], 2 if weight.dtype == torch.uint8 else 1
    one = scale.new_ones(())[None, None]
    numbers = dequantized(weight, one, None, inputs, torch.float32)
    if zero_point is not None:
        columns = zero_point.float() - 8
        numbers -= columns.repeat_interleave(inputs // columns.shape[1], 1)
    rows = BLOCK if scale.shape[0] not in (1, len(weight)) else 1
    factors = scale.float().repeat_interleave(rows, 0)[: len(weight)]
    factors = factors.expand(len(weight), -1)
    scales_blocks = scale.shape[1] > 1 or weight.dtype == torch.uint8
    factors = factors.expand(-1, inputs // BLOCK) if scales_blocks else factors
    lines = inputs // BLOCK // blocks_of_line // splits
    parts = []
    for part in range(splits):
        whole = torch.zeros(len(weight), len(x))
        for first in range(sums):
            total = torch.zeros_like(whole)
            for line in range(part * lines + first, (part + 1) * lines, sums):
                for block in range(line * blocks_of_line, (line + 1) * blocks_of_line):
                    some = slice(block * BLOCK, (block + 1) * BLOCK)
                    before = torch.zeros_like(whole) if scales_blocks else total
                    product = tensor_cores.multiply(numbers[:, some], x[:, some].T, before)
                    if scales_blocks:
                        product = tensor_cores.fma(product, factors[:, block, None], total)
                    total = product
            whole = whole + total
        added = torch.zeros(len(weight), 1)
        if part == 0 and bias is not None:
            added = bias.float()[:, None]
        whole = whole + added if scales_blocks else tensor_cores.fma(whole, factors, added)
        parts.append(whole.T)
    return torch.stack(parts).to(x.dtype if splits == 1 else torch.float32)


def plain_cases(device, dtypes, rows, shapes):
    """Yield the arguments of calls of ``linear``, with and without bias."""
    generator = torch.Generator().manual_seed(3)

    def random(dtype, *shape):
        return torch.randn(shape, generator=generator).to(dtype).to(device)

    for dtype, count, (outputs, inputs) in product(dtypes, rows, shapes):
        for bias in (None, random(dtype, outputs)):
            yield random(dtype, count, inputs), random(dtype, outputs, inputs), bias


def dequantized_experts(held):
    """Return the weights of ``QuantizedExperts``, [E, N, K] float32."""
    zeros = [None] * len(held) if held.zero_point is None else held.zero_point.data
    experts = zip(held.weight.data, held.scale.data, zeros, strict=True)
    weights = [dequantized(*each, held.in_features, torch.float32) for each in experts]
    return torch.stack(weights)


def assert_close(got, expected, inputs):
    """Compare results up to a few roundings of the largest number of a row's sum."""
    assert got.shape == expected.shape
    assert got.dtype == expected.dtype
    size = expected.double().square().mean().sqrt().item() if expected.numel() else 0.0
    eps = torch.finfo(got.dtype).eps
    wide = inputs**0.5 * torch.finfo(torch.float32).eps
    torch.testing.assert_close(
        got, expected, rtol=ROUNDINGS * eps, atol=ROUNDINGS * (eps + wide) * max(size, 1e-6)
    )
