"""Rotated heads for CUDA. Contract: ``graphkit.ops.rotary``."""

from typing import Any

import triton
import triton.language as tl

from graphkit.ops.kernels.launch import launch
from graphkit.ops.kernels.rms_norm import normalised
from graphkit.ops.rotary import Heads, empty_heads


@triton.jit
def rotated_heads_kernel(
    query, key, value, qkv, positions, inverse_frequencies, query_weight, key_weight, eps,
    QUERY_HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    STARTS_EARLY: tl.constexpr,
):  # fmt: skip
    """One program per row and head."""
    if STARTS_EARLY:
        tl.extra.cuda.gdc_wait()
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lane = tl.arange(0, BLOCK)
    inside = lane < HALF
    begin = qkv + (row * (QUERY_HEADS + 2 * KEY_HEADS) + head) * 2 * HALF + lane
    first = tl.load(begin, mask=inside, other=0.0)
    second = tl.load(begin + HALF, mask=inside, other=0.0)
    if head < QUERY_HEADS:
        out = query + (row * QUERY_HEADS + head) * 2 * HALF + lane
        if query_weight is not None:
            first, second = _normalised_pair(first, second, query_weight, eps, lane, HALF)
    elif head < QUERY_HEADS + KEY_HEADS:
        out = key + (row * KEY_HEADS + head - QUERY_HEADS) * 2 * HALF + lane
        if key_weight is not None:
            first, second = _normalised_pair(first, second, key_weight, eps, lane, HALF)
    else:
        out = value + (row * KEY_HEADS + head - QUERY_HEADS - KEY_HEADS) * 2 * HALF + lane
    if head < QUERY_HEADS + KEY_HEADS:
        frequency = tl.load(inverse_frequencies + lane, mask=inside, other=0.0)
        angle = tl.load(positions + row).to(tl.float32) * frequency
        cos = tl.cos(angle).to(first.dtype).to(tl.float32)
        sin = tl.sin(angle).to(first.dtype).to(tl.float32)
        one, two = first.to(tl.float32), second.to(tl.float32)
        dtype: tl.constexpr = first.dtype
        # Products are rounded before the sum, as in the reference.
        first = ((one * cos).to(dtype).to(tl.float32) - (two * sin).to(dtype).to(tl.float32)).to(
            dtype
        )
        second = ((two * cos).to(dtype).to(tl.float32) + (one * sin).to(dtype).to(tl.float32)).to(
            dtype
        )
    tl.store(out, first, mask=inside)
    tl.store(out + HALF, second, mask=inside)


@triton.jit
def _normalised_pair(first, second, weight, eps, lane, HALF: tl.constexpr):
    """Normalise a head that is held as two halves."""
    one, two = first.to(tl.float32), second.to(tl.float32)
    scale = tl.rsqrt(tl.sum(one * one + two * two, 0) / (2 * HALF) + eps)
    inside = lane < HALF
    of_first = tl.load(weight + lane, mask=inside, other=0.0)
    of_second = tl.load(weight + HALF + lane, mask=inside, other=0.0)
    return normalised(first, scale, of_first), normalised(second, scale, of_second)


def launch_rotated_heads(given: Any) -> Heads:
    """Launch ``rotated_heads``."""
    query, key, value = empty_heads(given)
    half = len(given.inverse_frequencies)
    grid = len(given.qkv), given.query_heads + 2 * given.key_heads
    launch(
        rotated_heads_kernel, grid, given, query=query, key=key, value=value,
        QUERY_HEADS=given.query_heads, KEY_HEADS=given.key_heads, HALF=half,
        BLOCK=triton.next_power_of_2(half), num_warps=1,
    )  # fmt: skip
    return query, key, value
