"""Heads of latent attention for CUDA. Contracts: ``graphkit.ops.latent_heads``."""

from typing import Any

import torch
import triton
import triton.language as tl

from graphkit.ops.kernels.decoder import normalised
from graphkit.ops.kernels.launch import KEPT_IN_L2, launch, wait_then_start_next
from graphkit.ops.latent_heads import empty_latent_query

HEADS, WARPS = 1, 2
"""Query heads and warps of a program in all batches. With other warps, the sum of squares of the
norm has another order."""


@triton.jit
def _store_rotated(
    out, x, inside, position, inverse_frequencies, HALF: tl.constexpr, BLOCK: tl.constexpr,
    FACTOR: tl.constexpr, INTERLEAVED: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Rotate the heads at ``x``, pointers [H, 1], and store them at ``out``."""
    lane = tl.arange(0, BLOCK)
    frequency = tl.load(
        inverse_frequencies + lane, mask=lane < HALF, other=0.0, eviction_policy=KEPT_IN_L2
    )
    angle = position.to(tl.float32) * frequency
    cos, sin = (tl.cos(angle) * FACTOR)[None, :], (tl.sin(angle) * FACTOR)[None, :]
    one, other = lane, lane + HALF
    to_one, to_other = one, other
    if INTERLEAVED:
        one, other = 2 * lane, 2 * lane + 1
        if not SPLITS:
            to_one, to_other = one, other
    mask = inside & (lane < HALF)[None, :]
    first = tl.load(x + one[None, :], mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x + other[None, :], mask=mask, other=0.0).to(tl.float32)
    dtype: tl.constexpr = out.dtype.element_ty
    tl.store(out + to_one[None, :], (first * cos - second * sin).to(dtype), mask=mask)
    tl.store(out + to_other[None, :], (second * cos + first * sin).to(dtype), mask=mask)


@triton.jit(do_not_specialize_on_alignment=["loc_T", "positions"])
def latent_heads_kernel(
    out, cache, loc_T, latent_NTR, rotated_TNE, latents_TC, positions, inverse_frequencies, weight,
    eps, slots, latent_head_stride, latent_row_stride, rotated_row_stride, rotated_head_stride,
    latents_stride, N: tl.constexpr, RANK: tl.constexpr, HALF: tl.constexpr, SLOT: tl.constexpr,
    HEADS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_F: tl.constexpr, FACTOR: tl.constexpr,
    INTERLEAVED: tl.constexpr, SPLITS: tl.constexpr, STARTS_EARLY: tl.constexpr,
):  # fmt: skip
    """One program per row and HEADS query heads, and one more per row for its latent."""
    wait_then_start_next(STARTS_EARLY)
    row, first_head = tl.program_id(0).to(tl.int64), tl.program_id(1) * HEADS
    position = tl.load(positions + row, eviction_policy=KEPT_IN_L2)
    r = tl.arange(0, BLOCK_R)
    if first_head < N:
        head = first_head + tl.arange(0, HEADS)[:, None]
        cells = latent_NTR + head * latent_head_stride + row * latent_row_stride + r[None, :]
        latent = tl.load(cells, mask=(r < RANK)[None, :], other=0.0)
        begin = out + (row * N + head) * (RANK + 2 * HALF)
        tl.store(begin + r[None, :], latent, mask=(r < RANK)[None, :])
        x = rotated_TNE + row * rotated_row_stride + head * rotated_head_stride
        _store_rotated(
            begin + RANK, x, head < N, position, inverse_frequencies, HALF, BLOCK_F, FACTOR,
            INTERLEAVED, SPLITS,
        )  # fmt: skip
    else:
        slot = tl.load(loc_T + row, eviction_policy=KEPT_IN_L2)
        is_slot = (slot >= 0) & (slot < slots)
        source = latents_TC + row * latents_stride
        elements = tl.load(source + r, mask=r < RANK, other=0.0)
        wide = elements.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide) / RANK + eps)
        result = normalised(elements, scale, tl.load(weight + r, mask=r < RANK, other=0.0))
        stored = cache + slot * SLOT
        tl.store(stored + r, result.to(cache.dtype.element_ty), mask=(r < RANK) & is_slot)
        place = tl.arange(0, 1)[:, None]
        _store_rotated(
            stored + RANK + place, source + RANK + place, is_slot & (place == 0), position,
            inverse_frequencies, HALF, BLOCK_F, FACTOR, INTERLEAVED, SPLITS,
        )  # fmt: skip


def launch_store_latent_heads(args: Any) -> torch.Tensor:
    """Launch ``store_latent_heads``."""
    out, latent, rotated = empty_latent_query(args), args.latent_NTR, args.rotated_TNE
    (count, rows, rank), half = latent.shape, len(args.inverse_frequencies)
    launch(
        latent_heads_kernel, (rows, count // HEADS + 1), args, out=out, cache=args.cache,
        latent_NTR=latent, rotated_TNE=rotated, latents_TC=args.latents_TC, slots=len(args.cache),
        latent_head_stride=latent.stride(0), latent_row_stride=latent.stride(1),
        rotated_row_stride=rotated.stride(0), rotated_head_stride=rotated.stride(1),
        latents_stride=args.latents_TC.stride(0), N=count, RANK=rank, HALF=half,
        SLOT=args.cache.stride(0), HEADS=HEADS, BLOCK_R=triton.next_power_of_2(rank),
        BLOCK_F=triton.next_power_of_2(half), FACTOR=args.factor, INTERLEAVED=args.interleaved,
        SPLITS=args.splits, num_warps=WARPS,
    )  # fmt: skip
    return out
