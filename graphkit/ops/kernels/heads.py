"""Heads of a decoder layer for CUDA. Contracts: ``graphkit.ops.heads``."""

import math
from typing import Any

import torch
import triton
import triton.language as tl

from graphkit.ops.heads import Heads, empty_heads, empty_query
from graphkit.ops.kernels.decoder import normalised, sum_of_parts
from graphkit.ops.kernels.devices import check_float8, multiprocessors
from graphkit.ops.kernels.kv_cache import scaled
from graphkit.ops.kernels.launch import KEPT_IN_L2, launch, wait_then_start_next
from graphkit.ops.kv_cache import FP8

MOST_HEADS = 8
"""Most heads that a program rotates."""


@triton.jit(do_not_specialize_on_alignment=["loc_T", "positions"])
def rotated_heads_kernel(
    query, key, value, loc_T, qkv, positions, inverse_frequencies, query_weight, key_weight,
    key_scale_M, value_scale_M, eps, size, slots,
    QUERY_HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr,
    BLOCK: tl.constexpr, PARTS: tl.constexpr, KEY_SLOT: tl.constexpr, VALUE_SLOT: tl.constexpr,
    IS_FP8: tl.constexpr, ROTATED: tl.constexpr, GATED: tl.constexpr, FACTOR: tl.constexpr,
    STARTS_EARLY: tl.constexpr,
):  # fmt: skip
    """One program per row and HEADS heads of one kind.

    ``qkv`` has PARTS parts, of ``size`` elements each. ``key`` and ``value`` are caches whose slots
    are KEY_SLOT and VALUE_SLOT elements apart. Without ``loc_T`` they have a slot per row. Lanes
    hold pairs of elements. Of heads whose first 2 * ROTATED elements are rotated, further pairs
    have the frequency 0, and no factor.
    """
    wait_then_start_next(STARTS_EARLY)
    row, first_head = tl.program_id(0).to(tl.int64), tl.program_id(1) * HEADS
    head = first_head + tl.arange(0, HEADS)
    lane = tl.arange(0, BLOCK)
    inside = (lane < HALF)[None, :] & (head >= 0)[:, None]  # the latter for the shape alone
    slot = row
    is_slot = row >= 0  # always true: every row has its own slot
    if loc_T is not None:
        slot = tl.load(loc_T + row, eviction_policy=KEPT_IN_L2)
        is_slot = (slot >= 0) & (slot < slots)
    one_of_pair, other = pair_offsets(lane, HALF, ROTATED)
    source, columns = head, QUERY_HEADS + 2 * KEY_HEADS
    if GATED:
        source = head + tl.minimum(head, QUERY_HEADS)
        columns += QUERY_HEADS
    begin = qkv + row * columns * 2 * HALF + source[:, None] * (2 * HALF)
    first = sum_of_parts(begin + one_of_pair[None, :], size, inside, PARTS, query.dtype.element_ty)
    second = sum_of_parts(begin + other[None, :], size, inside, PARTS, query.dtype.element_ty)
    if first_head < QUERY_HEADS + KEY_HEADS:
        if first_head < QUERY_HEADS:
            if query_weight is not None:
                first, second = _normalised_pair(
                    first, second, query_weight, eps, lane, HALF, ROTATED
                )
        elif key_weight is not None:
            first, second = _normalised_pair(first, second, key_weight, eps, lane, HALF, ROTATED)
        frequency = tl.load(
            inverse_frequencies + lane, mask=lane < ROTATED, other=0.0, eviction_policy=KEPT_IN_L2
        )
        position = tl.load(positions + row, eviction_policy=KEPT_IN_L2)
        angle = position.to(tl.float32) * frequency
        cos, sin = tl.cos(angle), tl.sin(angle)
        if FACTOR != 1.0:
            cos, sin = tl.where(lane < ROTATED, cos * FACTOR, cos), sin * FACTOR
        cos = cos.to(first.dtype).to(tl.float32)[None, :]
        sin = sin.to(first.dtype).to(tl.float32)[None, :]
        one, two = first.to(tl.float32), second.to(tl.float32)
        dtype: tl.constexpr = first.dtype
        # Products are rounded before the sum, as in the reference.
        first = ((one * cos).to(dtype).to(tl.float32) - (two * sin).to(dtype).to(tl.float32)).to(
            dtype
        )
        second = ((two * cos).to(dtype).to(tl.float32) + (one * sin).to(dtype).to(tl.float32)).to(
            dtype
        )
    if first_head < QUERY_HEADS:
        out = query + row * QUERY_HEADS * 2 * HALF + head[:, None] * (2 * HALF)
        tl.store(out + one_of_pair[None, :], first, mask=inside)
        tl.store(out + other[None, :], second, mask=inside)
    elif first_head < QUERY_HEADS + KEY_HEADS:
        _store_pairs(
            key + slot * KEY_SLOT, key_scale_M, head - QUERY_HEADS, first, second,
            inside & is_slot, lane, HALF, ROTATED, IS_FP8,
        )  # fmt: skip
    else:
        _store_pairs(
            value + slot * VALUE_SLOT, value_scale_M, head - QUERY_HEADS - KEY_HEADS, first, second,
            inside & is_slot, lane, HALF, ROTATED, IS_FP8,
        )  # fmt: skip


@triton.jit
def _store_pairs(
    heads, scale_M, head, first, second, inside, lane, HALF: tl.constexpr, ROTATED: tl.constexpr,
    IS_FP8: tl.constexpr,
):  # fmt: skip
    """Store heads that are held as two halves, in the dtype of a cache."""
    if IS_FP8:
        first = scaled(first, scale_M, head[:, None], inside)
        second = scaled(second, scale_M, head[:, None], inside)
    out = heads + head[:, None] * (2 * HALF)
    one, other = pair_offsets(lane, HALF, ROTATED)
    tl.store(out + one[None, :], first.to(heads.dtype.element_ty), mask=inside)
    tl.store(out + other[None, :], second.to(heads.dtype.element_ty), mask=inside)


@triton.jit
def pair_offsets(lane, HALF: tl.constexpr, ROTATED: tl.constexpr):
    """Return the places of the elements of pairs in a head."""
    if ROTATED != HALF:
        one = tl.where(lane < ROTATED, lane, lane + ROTATED)
        other = tl.where(lane < ROTATED, lane + ROTATED, lane + HALF)
    else:
        one, other = lane, lane + HALF
    return one, other


@triton.jit
def _normalised_pair(
    first, second, weight, eps, lane, HALF: tl.constexpr, ROTATED: tl.constexpr
):  # fmt: skip
    """Normalise heads that are held as two halves."""
    one, two = first.to(tl.float32), second.to(tl.float32)
    scale = tl.rsqrt(tl.sum(one * one + two * two, 1) / (2 * HALF) + eps)[:, None]
    inside = lane < HALF
    one_of_pair, other = pair_offsets(lane, HALF, ROTATED)
    of_first = tl.load(weight + one_of_pair, mask=inside, other=0.0)[None, :]
    of_second = tl.load(weight + other, mask=inside, other=0.0)[None, :]
    return normalised(first, scale, of_first), normalised(second, scale, of_second)


def launch_rotated_heads(args: Any) -> Heads:
    """Launch ``rotated_heads``."""
    query, key, value = empty_heads(args)
    _launch_heads(
        args, query, key, value, loc_T=None, slots=None, key_scale_M=None, value_scale_M=None
    )
    return query, key, value


def launch_store_rotated_heads(args: Any) -> torch.Tensor:
    """Launch ``store_rotated_heads``."""
    if args.key_cache.dtype == FP8:
        check_float8(args.key_cache.device, "store_rotated_heads")
    query, slots = empty_query(args), len(args.key_cache)
    _launch_heads(args, query, args.key_cache, args.value_cache, slots=slots)
    return query


def _launch_heads(
    args: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **others: Any
) -> None:
    half = len(args.inverse_frequencies)
    *parts, rows, columns = args.qkv.shape
    block = triton.next_power_of_2(half)
    heads = program_heads(args, rows)
    launch(
        rotated_heads_kernel, (rows, (args.query_heads + 2 * args.key_heads) // heads), args,
        query=query, key=key, value=value, size=rows * columns, PARTS=math.prod(parts),
        QUERY_HEADS=args.query_heads, KEY_HEADS=args.key_heads, HALF=half,
        HEADS=heads, BLOCK=block, KEY_SLOT=key.stride(0), VALUE_SLOT=value.stride(0),
        IS_FP8=key.dtype == FP8, ROTATED=args.rotated // 2 or half, GATED=args.gated,
        FACTOR=args.factor, num_warps=max(1, heads // 2), **others,
    )  # fmt: skip


def program_heads(args: Any, rows: int) -> int:
    """Return the heads of a program, a power of two, all of one kind.

    The number is doubled as long as each multiprocessor has two programs left: few large programs
    start later than many small ones. With a norm it is 1, so that the sum of squares has the same
    order for any number of rows.
    """
    heads = 1
    if args.query_weight is not None or args.key_weight is not None:
        return heads
    processors, _ = multiprocessors(args.qkv.device)
    programs = rows * (args.query_heads + 2 * args.key_heads)
    divided = math.gcd(args.query_heads, args.key_heads, MOST_HEADS)
    while divided % (2 * heads) == 0 and programs // (2 * heads) >= 2 * processors:
        heads *= 2
    return heads
