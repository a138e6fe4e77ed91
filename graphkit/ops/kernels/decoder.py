"""Parts of a decoder layer for CUDA. Contracts: ``graphkit.ops.decoder``."""

import math
from typing import Any

import torch
import triton
import triton.language as tl

from graphkit.ops.decoder import empty_sums
from graphkit.ops.kernels.launch import KEPT_IN_L2, launch, wait_for_kernel_before

NORM_BLOCK = 16384
"""Columns that a program holds at a time. Wider rows are read twice, the second time from cache."""
KEPT_ROWS = 256
"""Most rows whose residual stream is kept in the L2 cache. That of a long prompt would fill it."""
GATE_BLOCK = 1024
"""Columns of a program of the gate."""


@triton.jit
def normalised(x, scale, weight):
    """Return scaled values times their weights, each rounded to the dtype of ``x``."""
    y = (x.to(tl.float32) * scale).to(x.dtype)
    return (y.to(tl.float32) * weight.to(tl.float32)).to(x.dtype)


@triton.jit
def normalise_row(
    out, total, x, residual, weight, eps, size,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, STRIDE: tl.constexpr,
    POLICY: tl.constexpr,
):  # fmt: skip
    """Normalise one row; ``total`` and ``residual`` are both pointers to a row or both None.

    ``x`` has PARTS parts, of ``size`` elements each. Its columns are STRIDE elements apart.
    PARTS is 1 without a residual stream: a second pass reads ``x`` again. POLICY is the eviction
    policy of the residual stream.
    """
    lane = tl.arange(0, BLOCK)
    IS_WHOLE: tl.constexpr = WIDTH <= BLOCK
    if IS_WHOLE:  # nothing is read again, and the weights come together with the row
        factor = tl.load(weight + lane, mask=lane < WIDTH, other=0.0, eviction_policy=KEPT_IN_L2)
    squares = tl.zeros([BLOCK], tl.float32)
    for begin in tl.static_range(0, WIDTH, BLOCK):
        inside = begin + lane < WIDTH
        source = x + column_offsets(begin + lane, STRIDE)
        value = sum_of_parts(source, size, inside, PARTS, out.dtype.element_ty)
        if residual is not None:
            # A sum of two bf16 numbers is exact in float32 before it is rounded.
            before = tl.load(
                residual + begin + lane, mask=inside, other=0.0, eviction_policy=POLICY
            )
            wide = before.to(tl.float32) + value.to(tl.float32)
            value = wide.to(value.dtype)
            rounded = wide.to(total.dtype.element_ty)
            tl.store(total + begin + lane, rounded, mask=inside, eviction_policy=POLICY)
        wide = value.to(tl.float32)
        squares += wide * wide
    scale = tl.rsqrt(tl.sum(squares, 0) / WIDTH + eps)
    if not IS_WHOLE:
        tl.debug_barrier()  # other threads may read the sums that a thread has written
    for begin in tl.static_range(0, WIDTH, BLOCK):
        inside = begin + lane < WIDTH
        if not IS_WHOLE:
            if residual is None:
                value = tl.load(x + column_offsets(begin + lane, STRIDE), mask=inside, other=0.0)
            else:
                value = tl.load(total + begin + lane, mask=inside, other=0.0)
                value = value.to(out.dtype.element_ty)
            factor = tl.load(weight + begin + lane, mask=inside, other=0.0)
        tl.store(out + begin + lane, normalised(value, scale, factor), mask=inside)


@triton.jit
def column_offsets(column, STRIDE: tl.constexpr):
    """Return the offsets of columns that are STRIDE elements apart."""
    if STRIDE != 1:
        column = column.to(tl.int64) * STRIDE
    return column


@triton.jit
def rms_norm_kernel(
    out, total, x, residual, weight, eps, size, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    PARTS: tl.constexpr, RESIDUAL_STRIDE: tl.constexpr, POLICY: tl.constexpr,
    STARTS_EARLY: tl.constexpr,
):  # fmt: skip
    """One program per row; see ``normalise_row``. Rows of ``residual`` may be spaced."""
    wait_for_kernel_before(STARTS_EARLY)
    row = tl.program_id(0).to(tl.int64)
    if residual is not None:
        total += row * WIDTH
        residual += row * RESIDUAL_STRIDE
    normalise_row(
        out + row * WIDTH, total, x + row * WIDTH, residual, weight, eps, size,
        WIDTH, BLOCK, PARTS, 1, POLICY,
    )  # fmt: skip


@triton.jit
def sum_of_parts(pointer, size, mask, PARTS: tl.constexpr, dtype: tl.constexpr):
    """Return the sum of numbers that are ``size`` elements apart, in order, rounded to a dtype."""
    total = tl.load(pointer, mask=mask, other=0.0)
    for part in tl.static_range(1, PARTS):
        total += tl.load(pointer + part * size, mask=mask, other=0.0)
    return total.to(dtype)


def launch_rms_norm(args: Any, out: torch.Tensor) -> None:
    """Launch ``rms_norm``."""
    _launch_norm(args, out=out, total=None, residual=None, RESIDUAL_STRIDE=0)


def launch_add_rms_norm(args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch ``add_rms_norm``."""
    residual = args.residual if args.residual.stride(1) == 1 else args.residual.contiguous()
    out, total = empty_sums(args)
    _launch_norm(args, out=out, total=total, residual=residual, RESIDUAL_STRIDE=residual.stride(0))
    return out, total


def _launch_norm(args: Any, **others: Any) -> None:
    *parts, rows, width = args.x.shape
    launch(
        rms_norm_kernel, (rows,), args, size=rows * width, PARTS=math.prod(parts),
        POLICY=KEPT_IN_L2.value if rows <= KEPT_ROWS else "",
        **row_block(width), **others,
    )  # fmt: skip


def row_block(width: int) -> dict[str, int]:
    """Return the block in which a program reads a row, and its warps."""
    block = min(NORM_BLOCK, triton.next_power_of_2(width))
    return {"WIDTH": width, "BLOCK": block, "num_warps": min(32, max(1, block // 128))}


@triton.jit
def gated_rms_norm_kernel(
    out, x, gate, weight, columns, eps, gate_row, WIDTH: tl.constexpr, SIZE: tl.constexpr,
    BLOCK: tl.constexpr, SHARED: tl.constexpr, GATE_FIRST: tl.constexpr, SIGMOID: tl.constexpr,
    STARTS_EARLY: tl.constexpr,
):  # fmt: skip
    """One program per row and group of columns."""
    wait_for_kernel_before(STARTS_EARLY)
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lane = tl.arange(0, BLOCK)
    inside, column = lane < SIZE, group * SIZE + lane
    value = tl.load(x + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    place = column.to(tl.int64)
    if columns is not None:
        place = tl.load(columns + column, mask=inside, other=0)
    gates = tl.load(gate + row * gate_row + place, mask=inside, other=0.0).to(tl.float32)
    factor = 1.0 / (1.0 + tl.exp(-gates))
    if not SIGMOID:
        factor = gates * factor
    if GATE_FIRST:
        value = value * factor
    value = value * tl.rsqrt(tl.sum(value * value, 0) / SIZE + eps)
    own = lane if SHARED else column
    value = value * tl.load(weight + own, mask=inside, other=0.0).to(tl.float32)
    if not GATE_FIRST:
        value = value * factor
    tl.store(out + row * WIDTH + column, value.to(out.dtype.element_ty), mask=inside)


def launch_gated_rms_norm(args: Any, out: torch.Tensor) -> None:
    """Launch ``gated_rms_norm``."""
    rows, width = args.x.shape
    gate = args.gate if args.gate.stride(1) == 1 else args.gate.contiguous()
    block = triton.next_power_of_2(args.size)
    launch(
        gated_rms_norm_kernel, (rows, width // args.size), args, out=out, gate=gate,
        gate_row=gate.stride(0), WIDTH=width, SIZE=args.size, BLOCK=block,
        SHARED=len(args.weight) == args.size, GATE_FIRST=args.gate_first, SIGMOID=args.sigmoid,
        num_warps=min(16, max(1, block // 256)),
    )  # fmt: skip


@triton.jit(do_not_specialize=["tokens"])
def embed_and_join_kernel(
    out, ids, embedding, hidden, embedding_norm, hidden_norm, eps, tokens, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, ROW_STRIDE: tl.constexpr, STRIDE: tl.constexpr, STARTS_EARLY: tl.constexpr,
):  # fmt: skip
    """One program per half of a row. The embedding has the strides ROW_STRIDE and STRIDE."""
    wait_for_kernel_before(STARTS_EARLY)
    row = tl.program_id(0).to(tl.int64)
    half = out + row * 2 * WIDTH
    if tl.program_id(1) == 0:
        token = tl.load(ids + row).to(tl.int64)
        token = tl.minimum(tl.maximum(token, 0), tokens - 1)
        source = embedding + token * ROW_STRIDE
        write_half(half, source, embedding_norm, eps, WIDTH, BLOCK, STRIDE)
    else:
        write_half(half + WIDTH, hidden + row * WIDTH, hidden_norm, eps, WIDTH, BLOCK, 1)


@triton.jit
def write_half(out, x, weight, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, STRIDE: tl.constexpr):
    """Normalise a row, or copy it without a weight."""
    if weight is not None:
        normalise_row(out, None, x, None, weight, eps, 0, WIDTH, BLOCK, 1, STRIDE, "")
    else:
        for begin in tl.static_range(0, WIDTH, BLOCK):
            column = begin + tl.arange(0, BLOCK)
            value = tl.load(x + column_offsets(column, STRIDE), mask=column < WIDTH, other=0.0)
            tl.store(out + column, value, mask=column < WIDTH)


def launch_embed_and_join(args: Any, out: torch.Tensor) -> None:
    """Launch ``embed_and_join``. An embedding of any strides is read in place."""
    embedding, (rows, width) = args.embedding, args.hidden.shape
    launch(
        embed_and_join_kernel, (rows, 2), args, out=out, embedding=embedding,
        tokens=len(embedding), ROW_STRIDE=embedding.stride(0), STRIDE=embedding.stride(1),
        **row_block(width),
    )  # fmt: skip


@triton.jit
def silu_and_mul_kernel(
    out, gate_up, WIDTH: tl.constexpr, BLOCK: tl.constexpr, IS_INTERLEAVED: tl.constexpr,
    LIMIT: tl.constexpr, ALPHA: tl.constexpr, OFFSET: tl.constexpr, STARTS_EARLY: tl.constexpr,
):  # fmt: skip
    """One program per row and block of columns; see ``gated``."""
    wait_for_kernel_before(STARTS_EARLY)
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    begin = gate_up + row * 2 * WIDTH + column * (2 if IS_INTERLEAVED else 1)
    gate = tl.load(begin, mask=inside, other=0.0)
    up = tl.load(begin + (1 if IS_INTERLEAVED else WIDTH), mask=inside, other=0.0)
    value = gated(gate, up, LIMIT, ALPHA, OFFSET)
    tl.store(out + row * WIDTH + column, value, mask=inside)


@triton.jit
def gated(
    gate, up, LIMIT: tl.constexpr = 0.0, ALPHA: tl.constexpr = 1.0, OFFSET: tl.constexpr = 0.0
):
    """Return ``silu(gate) * up``; silu is rounded to the dtype before the product.

    The other parameters are those of ``graphkit.ops.experts.expert_linear``.
    """
    wide, wide_up = gate.to(tl.float32), up.to(tl.float32)
    if LIMIT != 0:
        NAN: tl.constexpr = tl.PropagateNan.ALL
        wide = tl.minimum(wide, LIMIT, propagate_nan=NAN)
        wide_up = tl.maximum(wide_up, -LIMIT, propagate_nan=NAN)
        wide_up = tl.minimum(wide_up, LIMIT, propagate_nan=NAN)
    activated = (wide / (1.0 + tl.exp(-wide * ALPHA))).to(gate.dtype)
    if OFFSET != 0:
        wide_up += OFFSET
    return (activated.to(tl.float32) * wide_up).to(gate.dtype)


def launch_silu_and_mul(args: Any, out: torch.Tensor) -> None:
    """Launch ``silu_and_mul``."""
    gate_rows(args, args.gate_up.contiguous(), out)


def gate_rows(
    args: Any, gate_up: torch.Tensor, out: torch.Tensor, *, interleaved: bool = False,
    limit: float = 0.0, alpha: float = 1.0, offset: float = 0.0,
) -> torch.Tensor:  # fmt: skip
    """Launch ``silu_and_mul`` of contiguous rows, in an op with these arguments.

    The others are those of ``expert_linear``.
    """
    rows, width = out.shape
    block = min(GATE_BLOCK, triton.next_power_of_2(width))
    grid = rows, triton.cdiv(width, block)
    launch(
        silu_and_mul_kernel, grid, args, out=out, gate_up=gate_up, WIDTH=width, BLOCK=block,
        IS_INTERLEAVED=interleaved, LIMIT=limit, ALPHA=alpha, OFFSET=offset,
    )  # fmt: skip
    return out
