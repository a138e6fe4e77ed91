"""Products with the weights of chosen experts, for CUDA. Contract: ``graphkit.ops.experts``.

A program holds a tile of outputs of an expert, by the rows that chose it. In batches of few rows
it finds these itself, in the choices of all rows, so that no kernel runs before. Groups are then
the pairs of a row and a choice where these are fewer than the experts, and the first pair of an
expert is its group. Otherwise groups are experts. A program whose group has no rows ends at once.

The rows of an expert are multiplied in tiles of few rows or of many, which give the same bits:
Triton adds the inputs of an output in order, in steps of 16, whatever the tile, and so does cuBLAS.
Of quantised weights, a warp adds other groups of 16 inputs than a warpgroup: each thread holds four
consecutive numbers, and that of a warpgroup two. Row-invariant products thus run by warps alone.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch.nn import functional

from graphkit.ops.experts import (
    SEARCHED_ROWS,
    empty_choices,
    empty_products,
    group_by_expert,
    group_by_sort,
)
from graphkit.ops.kernels.decoder import gate_rows, gated
from graphkit.ops.kernels.devices import check_float8
from graphkit.ops.kernels.launch import launch, wait_for_kernel_before
from graphkit.ops.kernels.quantized_linear_config import TiledProduct
from graphkit.ops.kernels.quantized_numbers import scale_row
from graphkit.ops.kernels.tiled_linear import nibble_code, prefetch, tile_sums
from graphkit.ops.quantized_layout import BLOCK

MOST_ROWS = 64
"""Most rows of a tile."""
MOST_ROWS_OF_EXPERT = 128
"""Most pairs for each expert of bfloat16 that the kernel multiplies if bits may differ between
numbers of rows. On an H200 it was faster than the grouped product of torch up to 2,048 rows of the
layer of ``tools/bench/experts.py``, which have 128 pairs for each expert."""
MOST_ROWS_OF_WARPS = 256
"""Most rows whose quantised weights warps multiply if bits may differ between numbers of rows. On
an H200, warps were faster for 128 rows of the layer of ``tools/bench/experts.py``, and warpgroups
for 512."""
EARLY_BYTES = 512
"""Bytes of each output that a program requests into the L2 cache while it finds its rows."""
CHUNKS = 64, 128
"""Choices that a program compares at a time, for batches that have no more, and for others. A
matrix of more takes too many registers, and each size is compiled."""
MOST_COUNTED = 4096
"""Most pairs that a kernel brings into order by counting for each the pairs before it."""
COUNT_BLOCK, COUNT_CHUNK = 32, 128
"""Pairs and experts of a program of that kernel, and the pairs that it counts at a time."""
CHOSEN_OF_WARP = 1024
"""Experts among which a warp finds the choices of a row. More warps would wait for each other at
each choice."""
SUM_BLOCK = 512
"""Columns that a program of the weighted sum adds."""


@dataclass(frozen=True, slots=True)
class ExpertTiles:
    """How a launch of ``expert_linear_kernel`` divides its work.

    Attributes:
        few: Tiles of experts that few rows chose.
        many: Tiles of other experts; ``None`` if tiles of ``few`` hold all rows.
    """

    few: TiledProduct
    many: TiledProduct | None


def choose_tiles(rows: int, bits: int, row_invariant: bool = True) -> ExpertTiles:
    """Return how the kernel runs, for an H200.

    A multiprocessor needs 33 KiB of the weight in flight at 4.3 TB/s and a latency of 1 us. Three
    stages of a program are in flight, with 128 bytes or 128 numbers of 16 bits of each output: 48
    KiB in each of two programs in 16 bits, and 12 KiB in each of six or more else. These numbers of
    outputs and warps are those of ``choose_product`` for few rows. One row in 16 bits, numbers of
    four bits, and more than ``MOST_ROWS`` rows were fastest as below (``--sweep``).

    Args:
        rows: Rows of the batch.
        bits: Bits of a number of the weight.
        row_invariant: As of ``expert_linear``.
    """
    least, most, stages = 16, MOST_ROWS, 3 if bits == 4 else 4
    if bits > 16:
        outputs, warps, stages = 32, 2, 2
    elif bits == 16:
        outputs, warps = (128, 8) if rows == 1 else (64, 4)
    elif rows <= MOST_ROWS:
        outputs, warps, least = 32, 2, 8
        most = 32  # more take too many registers; further tiles read the weight from the L2 cache
    elif row_invariant or rows <= MOST_ROWS_OF_WARPS:
        outputs, warps, stages, most = 64, 2, 4, 32
    else:
        outputs = 128 if bits == 8 else 64
        warps = outputs // 16
    tile = min(most, max(least, triton.next_power_of_2(rows)))
    if rows <= SEARCHED_ROWS:
        return ExpertTiles(TiledProduct(outputs, tile, 1, warps, stages), None)
    few = TiledProduct(outputs, least, 1, warps, stages)
    return ExpertTiles(few, TiledProduct(outputs, tile, 1, warps, min(stages, 3)))


@triton.jit
def _choices(
    experts, slots, place, pairs, CHOICES: tl.constexpr, EXPERTS: tl.constexpr
):  # fmt: skip
    """Return the experts of pairs, -1 for pads and for what is no expert."""
    is_pair = place < pairs
    expert = tl.load(experts + place, mask=is_pair, other=-1).to(tl.int32)
    if slots is not None:
        slot = tl.load(slots + place // CHOICES, mask=is_pair, other=0)
        expert = tl.where(slot > 0, expert, -1)
    return tl.where((expert >= 0) & (expert < EXPERTS), expert, -1)


@triton.jit
def _search(
    experts, slots, expert, group, pairs, CHOICES: tl.constexpr, EXPERTS: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Return the number of pairs of the expert of a group, and BLOCK_T of them, -1 for none.

    An expert whose first pair is another group has none here.
    """
    t, pair = tl.arange(0, BLOCK_T), tl.full([BLOCK_T], -1, tl.int32)
    count, before = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    for begin in range(0, pairs, CHUNK):
        place = begin + tl.arange(0, CHUNK)
        is_own = _choices(experts, slots, place, pairs, CHOICES, EXPERTS) == expert
        number = tl.cumsum(is_own.to(tl.int32), 0) - 1 + count
        is_here = is_own[:, None] & (number[:, None] == t[None, :])
        pair += tl.sum(tl.where(is_here, place[:, None] + 1, 0), 0)
        count += tl.sum(is_own.to(tl.int32), 0)
        before += tl.sum((is_own & (place < group)).to(tl.int32), 0)
    if pairs <= EXPERTS:
        count = tl.where((expert >= 0) & (before == 0), count, 0)
    return count, pair


@triton.jit
def _outputs(
    N: tl.constexpr, BLOCK_N: tl.constexpr, IS_GATED: tl.constexpr, IS_INTERLEAVED: tl.constexpr
):
    """Return the outputs of a program, and which of them the weight has.

    Those of a gated product are outputs of the gate, then those of the up projection at the same
    places, or both in turn as the weight has them.
    """
    place = tl.arange(0, BLOCK_N)
    n = tl.program_id(0) * BLOCK_N + place
    is_n = n < N
    if IS_GATED and not IS_INTERLEAVED:
        HALF: tl.constexpr = BLOCK_N // 2
        own = tl.program_id(0) * HALF + place % HALF
        n = own + place // HALF * (N // 2)
        is_n = own < N // 2
    return n, is_n


@triton.jit
def _write_tile(
    out, x, expert, pair, weight, scale, zero_point, bias,
    CHOICES: tl.constexpr, IS_SHARED: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    ROW: tl.constexpr, EXPERT_STRIDE: tl.constexpr, OUTPUT_STRIDE: tl.constexpr,
    STRIDE: tl.constexpr, IS_PACKED: tl.constexpr, SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr, STEPS: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, PACK: tl.constexpr,
    STAGES: tl.constexpr, IS_GATED: tl.constexpr, IS_INTERLEAVED: tl.constexpr,
    LIMIT: tl.constexpr, ALPHA: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """Write the products of pairs of an expert, in a tile of outputs."""
    HALF: tl.constexpr = BLOCK_N // 2
    COLUMNS: tl.constexpr = N // 2 if IS_GATED else N
    n, is_n = _outputs(N, BLOCK_N, IS_GATED, IS_INTERLEAVED)
    is_t = pair >= 0
    row_of_x = pair // CHOICES if IS_SHARED else pair
    inputs = x + tl.maximum(row_of_x, 0).to(tl.int64)[None, :] * K + tl.arange(0, 128)[:, None]
    own_weight = weight + expert.to(tl.int64) * EXPERT_STRIDE
    own_scale, own_zero = scale, zero_point
    if scale is not None:
        scales = expert.to(tl.int64) * (SCALE_ROWS * SCALE_COLUMNS)
        own_scale = scale + scales
        if zero_point is not None:
            own_zero = zero_point + scales
    ALL_K: tl.constexpr = K % (256 if IS_PACKED else 128) == 0
    # Scales count for the sums of a block in tiles of all sizes, which thus have the same bits.
    total = tile_sums(
        x, inputs, own_weight + n.to(tl.int64) * OUTPUT_STRIDE, own_scale, own_zero,
        scale_row(n, N, SCALE_ROWS), is_n, is_t, 0, K, ROW, IS_PACKED, SCALE_COLUMNS, STEPS, ALL_K,
        scale is not None, PRECISION, LOW, HIGH, PACK, 1, STRIDE, STAGES, 1, 1,
    )  # fmt: skip
    dtype = out.dtype.element_ty
    result = total.to(dtype)
    if bias is not None:
        added = tl.load(bias + expert * N + n, mask=is_n, other=0.0).to(dtype).to(tl.float32)
        result = (result.to(tl.float32) + added[:, None]).to(dtype)
    place_of_t = tl.maximum(pair, 0).to(tl.int64)[None, :] * COLUMNS
    if IS_GATED:
        if IS_INTERLEAVED:
            halves = tl.permute(tl.reshape(result, [HALF, 2, pair.shape[0]]), (0, 2, 1))
        else:
            halves = tl.permute(tl.reshape(result, [2, HALF, pair.shape[0]]), (1, 2, 0))
        gate, up = tl.split(halves)
        column = tl.program_id(0) * HALF + tl.arange(0, HALF)
        is_place = (column < COLUMNS)[:, None] & is_t[None, :]
        value = gated(gate, up, LIMIT, ALPHA, OFFSET)
        tl.store(out + place_of_t + column[:, None], value, mask=is_place)
    else:
        tl.store(out + place_of_t + n[:, None], result, mask=is_n[:, None] & is_t[None, :])


@triton.jit(do_not_specialize=["pairs"])
def expert_linear_kernel(
    out, x, experts, slots, order, ends, weight, scale, zero_point, bias, pairs,
    EXPERTS: tl.constexpr, CHOICES: tl.constexpr, IS_SHARED: tl.constexpr, N: tl.constexpr,
    K: tl.constexpr, ROW: tl.constexpr, EXPERT_STRIDE: tl.constexpr, OUTPUT_STRIDE: tl.constexpr,
    STRIDE: tl.constexpr, IS_PACKED: tl.constexpr, SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr, STEPS: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, FEW: tl.constexpr, FEW_LOW: tl.constexpr, FEW_HIGH: tl.constexpr,
    FEW_PACK: tl.constexpr, MANY: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
    PACK: tl.constexpr, STAGES: tl.constexpr, IS_GATED: tl.constexpr, IS_INTERLEAVED: tl.constexpr,
    LIMIT: tl.constexpr, ALPHA: tl.constexpr, OFFSET: tl.constexpr, CHUNK: tl.constexpr,
    EARLY_LINES: tl.constexpr, FOLLOWS: tl.constexpr, STARTS_EARLY: tl.constexpr,
):  # fmt: skip
    """One program per tile of outputs and group; see the module.

    Without ``order`` no expert has more pairs than FEW. With ``order`` groups are experts, whose
    pairs lie there one behind the other up to their place in ``ends``; experts of at most FEW pairs
    run in a tile of FEW rows, others in tiles of MANY. A step is 128 numbers of an output, or 128
    bytes of two.

    The kernel lets the next one start after it waits. When one that follows it starts, all kernels
    before it have thus ended: it reads their choices before it waits for the rows.
    """
    if STARTS_EARLY and not FOLLOWS:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    group = tl.program_id(1)
    expert, begin = group, 0
    if order is not None:
        begin = tl.load(ends + group - 1, mask=group > 0, other=0)
        count = tl.load(ends + group) - begin
        may_have_pairs = count > 0
    elif pairs <= EXPERTS:
        expert = _choices(experts, slots, group, pairs, CHOICES, EXPERTS)
        may_have_pairs = expert >= 0
    else:
        may_have_pairs = expert < 0  # a search tells
    if STARTS_EARLY and STRIDE == 1:  # noqa: SIM102 - the compiler knows this, the program the next
        if may_have_pairs:
            n, is_n = _outputs(N, BLOCK_N, IS_GATED, IS_INTERLEAVED)
            row = weight + expert.to(tl.int64) * EXPERT_STRIDE
            row += tl.where(is_n, n, 0).to(tl.int64) * OUTPUT_STRIDE
            LINE: tl.constexpr = 1024 // weight.dtype.element_ty.primitive_bitwidth  # 128 bytes
            line = tl.minimum(tl.arange(0, EARLY_LINES) * LINE, ROW - 1)
            prefetch(row[:, None] + line[None, :])
    if order is None:
        count, pair = _search(
            experts, slots, expert, group, pairs, CHOICES, EXPERTS, CHUNK, FEW
        )  # fmt: skip
    if STARTS_EARLY and FOLLOWS:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if count > 0:
        if MANY is None or count <= FEW:
            if order is not None:
                t = tl.arange(0, FEW)
                pair = tl.load(order + begin + t, mask=t < count, other=-1)
            _write_tile(
                out, x, expert, pair, weight, scale, zero_point, bias, CHOICES, IS_SHARED, N, K,
                ROW, EXPERT_STRIDE, OUTPUT_STRIDE, STRIDE, IS_PACKED, SCALE_ROWS, SCALE_COLUMNS,
                STEPS, PRECISION, BLOCK_N, FEW_LOW, FEW_HIGH, FEW_PACK, None, IS_GATED,
                IS_INTERLEAVED, LIMIT, ALPHA, OFFSET,
            )  # fmt: skip
        else:
            for first in range(0, count, MANY):
                t = first + tl.arange(0, MANY)
                several = tl.load(order + begin + t, mask=t < count, other=-1)
                _write_tile(
                    out, x, expert, several, weight, scale, zero_point, bias, CHOICES, IS_SHARED,
                    N, K, ROW, EXPERT_STRIDE, OUTPUT_STRIDE, STRIDE, IS_PACKED, SCALE_ROWS,
                    SCALE_COLUMNS, STEPS, PRECISION, BLOCK_N, LOW, HIGH, PACK, STAGES, IS_GATED,
                    IS_INTERLEAVED, LIMIT, ALPHA, OFFSET,
                )  # fmt: skip


def launch_expert_linear(args: Any, tiles: ExpertTiles | None = None) -> torch.Tensor:
    """Launch ``expert_linear``, with ``choose_tiles`` by default."""
    x, weight, scale = args.x.contiguous(), args.weight, args.scale
    (tokens, choices), inputs = args.experts.shape, x.shape[1]
    num_experts, outputs, row = weight.shape
    out, is_packed = empty_products(args), weight.dtype == torch.uint8
    if not out.numel():
        return out
    gate: dict[str, Any] = {
        "interleaved": args.interleaved, "limit": args.limit, "alpha": args.alpha,
        "offset": args.offset,
    }  # fmt: skip
    order, ends = args.order, args.ends
    if tokens <= SEARCHED_ROWS:
        order, ends = None, None
    elif order is None or ends is None:
        order, ends = group_by_expert(args.experts, num_experts, args.slots)
    is_fastest = tiles is None and not args.row_invariant
    has_many = tokens * choices > MOST_ROWS_OF_EXPERT * num_experts
    if has_many and is_fastest and can_group(x, weight):
        return _grouped(args, x, order, ends, out, gate)
    if weight.dtype == torch.float8_e4m3fn:
        check_float8(x.device, "expert_linear")
    if scale is not None:
        weight = weight.contiguous().view(torch.uint8)
    bits = 4 if is_packed else 8 * weight.element_size()
    tiles = tiles or choose_tiles(tokens, bits, args.row_invariant)
    few, many = tiles.few, tiles.many or tiles.few
    codes: list[tuple[str | None, str | None]] = [(None, None)] * 2
    if is_packed:
        codes = [nibble_code(x, tile, args.zero_point is not None) for tile in (few, many)]
    (low, high), (many_low, many_high) = codes
    columns = few.outputs // 2 if args.swiglu else few.outputs
    grid = triton.cdiv(out.shape[1], columns), num_experts
    if order is None:
        grid = grid[0], min(num_experts, tokens * choices)
    launch(
        expert_linear_kernel, grid, args, out=out, x=x, order=order, ends=ends, weight=weight,
        pairs=tokens * choices, EXPERTS=num_experts, CHOICES=choices,
        IS_SHARED=len(x) != tokens * choices, N=outputs, K=inputs, ROW=row,
        EXPERT_STRIDE=weight.stride(0), OUTPUT_STRIDE=weight.stride(1), STRIDE=weight.stride(2),
        IS_PACKED=is_packed, SCALE_ROWS=0 if scale is None else scale.shape[1],
        SCALE_COLUMNS=0 if scale is None else scale.shape[2], STEPS=triton.cdiv(row, BLOCK),
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32", BLOCK_N=few.outputs,
        FEW=few.rows, FEW_LOW=low, FEW_HIGH=high, FEW_PACK=few.pack,
        MANY=None if tiles.many is None else many.rows, LOW=many_low, HIGH=many_high,
        PACK=many.pack, STAGES=many.num_stages, IS_GATED=args.swiglu,
        IS_INTERLEAVED=args.interleaved, LIMIT=args.limit, ALPHA=args.alpha, OFFSET=args.offset,
        CHUNK=CHUNKS[tokens * choices > CHUNKS[0]],
        EARLY_LINES=EARLY_BYTES // 128, FOLLOWS=args.follows_product,
        num_warps=few.num_warps, num_stages=few.num_stages,
        enable_fp_fusion=False,  # which tiles of other sizes might do elsewhere
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["pairs"])
def group_kernel(
    order, ends, experts, slots, pairs, CHOICES: tl.constexpr, EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, STARTS_EARLY: tl.constexpr,
):  # fmt: skip
    """One program per BLOCK pairs and experts: count the pairs before each, and up to it."""
    wait_for_kernel_before(STARTS_EARLY)
    own = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = _choices(experts, slots, own, pairs, CHOICES, EXPERTS)
    key = tl.where(expert < 0, EXPERTS, expert)
    rank, end = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    for begin in range(0, pairs, CHUNK):
        place = begin + tl.arange(0, CHUNK)
        other = _choices(experts, slots, place, pairs, CHOICES, EXPERTS)
        other = tl.where(other < 0, EXPERTS, other)[None, :]
        is_earlier = (place[None, :] < own[:, None]) & (other == key[:, None])
        is_before = ((other < key[:, None]) | is_earlier) & (place < pairs)[None, :]
        rank += tl.sum(is_before.to(tl.int32), 1)
        end += tl.sum((other <= own[:, None]).to(tl.int32), 1)
    tl.store(order + rank, own, mask=own < pairs)
    tl.store(ends + own, end, mask=own < EXPERTS)


def launch_group_by_expert(args: Any, results: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Launch ``group_by_expert``."""
    order, ends = results
    pairs = order.numel()
    if pairs > MOST_COUNTED:
        for result, value in zip(results, group_by_sort(*args), strict=True):
            result.copy_(value)
        return
    launch(
        group_kernel, (triton.cdiv(max(pairs, args.num_experts), COUNT_BLOCK),), args, order=order,
        ends=ends, pairs=pairs, CHOICES=args.experts.shape[1], EXPERTS=args.num_experts,
        BLOCK=COUNT_BLOCK, CHUNK=COUNT_CHUNK, num_warps=4,
    )  # fmt: skip


def can_group(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether ``grouped_mm`` runs without a wait: in bfloat16, with rows of 16 bytes."""
    strides = sorted(weight.stride()[1:])
    return (
        x.is_cuda
        and x.dtype == weight.dtype == torch.bfloat16
        and torch.cuda.get_device_capability(x.device) >= (8, 0)
        and strides[0] == 1
        and all(stride % 8 == 0 for stride in (weight.stride(0), strides[1], x.shape[1]))
        and weight.data_ptr() % 16 == 0
    )


def _grouped(
    args: Any, x: torch.Tensor, order: torch.Tensor, ends: torch.Tensor, out: torch.Tensor,
    gate: dict[str, Any],
) -> torch.Tensor:  # fmt: skip
    """Write the products by one grouped product of torch, over pairs that are sorted by expert."""
    rows = order // args.experts.shape[1] if len(x) == len(args.experts) else order
    products = functional.grouped_mm(x[rows], args.weight.transpose(1, 2), offs=ends)
    if args.bias is not None:
        experts = args.experts.flatten()[order].clamp(0, len(args.weight) - 1)
        products += args.bias.to(x.dtype)[experts]
    if args.swiglu:
        # Rows of a grouped product are padded to 16 bytes (torch 2.11).
        products = gate_rows(args, products.contiguous(), torch.empty_like(out), **gate)
    out[order] = products
    return out


@triton.jit
def choose_experts_kernel(
    factors, experts, logits, row_stride, EXPERTS: tl.constexpr, CHOICES: tl.constexpr,
    NORMALISE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_C: tl.constexpr,
    STARTS_EARLY: tl.constexpr,
):  # fmt: skip
    """One program per row. It finds its choices one after the other."""
    wait_for_kernel_before(STARTS_EARLY)
    row = tl.program_id(0).to(tl.int64)
    lane, place = tl.arange(0, BLOCK), tl.arange(0, BLOCK_C)
    wide = tl.load(logits + row * row_stride + lane, mask=lane < EXPERTS, other=float("-inf"))
    wide = wide.to(tl.float32)
    powers = tl.exp(wide - tl.maximum(tl.max(wide, 0), -3e38))  # a maximum may ignore NaN
    probs = powers / tl.sum(powers, 0)
    left = tl.where(probs == probs, probs, -1.0)
    left = tl.where(lane < EXPERTS, left, -2.0)
    found = tl.zeros([BLOCK_C], tl.float32)
    chosen = tl.zeros([BLOCK_C], tl.int32)
    for choice in range(CHOICES):  # not unrolled: a kernel of one warp waits for its instructions
        best = tl.argmax(left, 0, tie_break_left=True)
        is_best = lane == best
        found = tl.where(place == choice, tl.sum(tl.where(is_best, probs, 0.0), 0), found)
        chosen = tl.where(place == choice, best, chosen)
        left = tl.where(is_best, -3.0, left)
    if NORMALISE:
        found = found / tl.sum(found, 0)
    inside = place < CHOICES
    tl.store(factors + row * CHOICES + place, found.to(factors.dtype.element_ty), mask=inside)
    tl.store(experts + row * CHOICES + place, chosen.to(tl.int64), mask=inside)


def launch_choose_experts(args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch ``choose_experts``."""
    logits = args.logits if args.logits.stride(1) == 1 else args.logits.contiguous()
    factors, experts = empty_choices(args)
    rows, count = logits.shape
    block = triton.next_power_of_2(count)
    launch(
        choose_experts_kernel, (rows,), args, factors=factors, experts=experts, logits=logits,
        row_stride=logits.stride(0), EXPERTS=count, CHOICES=args.choices,
        NORMALISE=args.normalise, BLOCK=block, BLOCK_C=triton.next_power_of_2(args.choices),
        num_warps=max(1, min(8, block // CHOSEN_OF_WARP)), enable_fp_fusion=False,
    )  # fmt: skip
    return factors, experts


@triton.jit
def expert_sum_kernel(
    out, rows, factors, experts, slots, shared, shared_gate, WIDTH: tl.constexpr,
    CHOICES: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, STARTS_EARLY: tl.constexpr,
):  # fmt: skip
    """One program per row and block of columns."""
    wait_for_kernel_before(STARTS_EARLY)
    row, column = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, total = column < WIDTH, tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(CHOICES):
        pair = row * CHOICES + choice
        is_chosen = _choices(experts, slots, pair, (row + 1) * CHOICES, CHOICES, EXPERTS) >= 0
        factor = tl.load(factors + pair).to(tl.float32)
        place = rows + pair.to(tl.int64) * WIDTH + column
        # A load of all rows does not wait for the choices; those of no expert are undefined.
        value = tl.load(place, mask=inside, other=0.0).to(tl.float32)
        total += tl.where(is_chosen, value * factor, 0.0)
    result, place = total.to(out.dtype.element_ty), row.to(tl.int64) * WIDTH + column
    if shared is not None:
        added = tl.load(shared + place, mask=inside, other=0.0)
        if shared_gate is not None:
            gate = tl.load(shared_gate + row)
            gate = (1.0 / (1.0 + tl.exp(-gate.to(tl.float32)))).to(gate.dtype)
            added = (gate.to(tl.float32) * added.to(tl.float32)).to(added.dtype)
        result = (result.to(tl.float32) + added.to(tl.float32)).to(result.dtype)
    tl.store(out + place, result, mask=inside)


def launch_expert_sum(args: Any, out: torch.Tensor) -> None:
    """Launch ``expert_sum``."""
    rows, width = out.shape
    block = min(SUM_BLOCK, triton.next_power_of_2(width))
    launch(
        expert_sum_kernel, (rows, triton.cdiv(width, block)), args, out=out, WIDTH=width,
        CHOICES=args.experts.shape[1], EXPERTS=args.num_experts, BLOCK=block, num_warps=4,
        enable_fp_fusion=False,  # a product is rounded before it is added, as in the reference
    )  # fmt: skip
