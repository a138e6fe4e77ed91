"""How ``quantized_linear`` and ``linear`` run: the one place that chooses."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton

from graphkit.ops.kernels.devices import has_dependent_launch, has_warpgroups, multiprocessors
from graphkit.ops.kernels.streamed_linear_config import (
    FEW_ROWS,
    LEAST_WARPGROUP_ROWS,
    MOST_STREAMED_ROWS,
    choose_streamed,
    choose_streamed_by_warpgroups,
    parts_of_many_rows,
)
from graphkit.ops.kernels.streamed_plain_config import FEW_PLAIN_ROWS, choose_streamed_plain
from graphkit.ops.kernels.streamed_product import RESERVED_BYTES, StreamedProduct
from graphkit.ops.quantized_layout import BLOCK, blocks, pairs

DTYPES_OF_16_BITS = torch.bfloat16, torch.float16
"""Dtypes of rows that are multiplied in 16 bits."""
MOST_ROWS = 256
"""Most rows that convert the numbers of a quantised weight on the way. More are limited by
arithmetic: each tile of rows would convert them again. Writing and reading a converted weight takes
the time of the products of about 460 rows on an H200 (five bytes per weight at 4.3 TB/s, two
operations per weight and row at 790 TFLOP/s)."""
TILE, LARGE_TILE = 32, 128
"""Outputs of a program of few rows, 4 KiB of numbers per step of its loop, and of more rows. Over
numbers of four bits, two programs of a multiprocessor have half of the larger tile each: their
registers and shared memory leave no room for a third."""
PROGRAMS = {8: 6, 4: 8}
"""Programs of a multiprocessor for few rows that do not stream, by the bits of a number
(``tools/bench/results/quantized_linear_sweep.json``)."""
MOST_IN_FLIGHT = 6
"""Most blocks of inputs that a program of few rows has in flight. A program has fewer blocks in
flight where otherwise not all programs would run at the same time: for 8 rows in FP8 the gate and
up projection takes 35 us instead of 44 us (``tools/bench/results/quantized_linear_sweep.json``)."""
PLAIN_TILE, PLAIN_PROGRAMS = 64, 2
"""Outputs of a program over a weight of 16 bits, and programs of a multiprocessor. A layer without
attention takes 117 us for one row with these, 146 us with 32 outputs and four programs, and 123 us
by cuBLAS (``tools/bench/results/linear_chain_tiles.json``)."""
LEAST_BLOCKS = 4
"""Least blocks of inputs of a part: below that, adding the parts costs more than it saves."""


@dataclass(frozen=True, slots=True)
class TiledProduct:
    """How a launch of ``linear_kernel`` divides its work.

    Attributes:
        outputs: Outputs of a program, a power of two, at least 16.
        rows: Rows of a program, a power of two, at least 8.
        splits: Parts of the inputs.
        num_warps: Warps of a program.
        num_stages: Passes of the loop in flight in a program, the current one included.
        unroll: Steps of a pass of the loop. A step is a block of inputs, or a pair of blocks of
            numbers of four bits.
        early_bytes: Bytes of each row of the weight that a program requests while the kernel before
            it runs, 0 or a power of two of at least 128.
        sums: As of ``StreamedProduct``.
        line_steps: Steps of a line of a quantised weight.
        widens: Whether another kernel converts the numbers of a quantised weight before.
    """

    outputs: int
    rows: int
    splits: int
    num_warps: int = 4
    num_stages: int = 4
    unroll: int = 1
    early_bytes: int = 512
    sums: int = 1
    line_steps: int = 1
    widens: bool = False

    @property
    def pack(self) -> int:
        """Consecutive numbers of a row in a register."""
        is_warpgroup = self.num_warps % 4 == 0 and self.outputs % 64 == 0 and self.rows >= 16
        return 2 if is_warpgroup else 4


Product = TiledProduct | StreamedProduct
"""How a launch divides its work."""


def grid_of(product: Product, rows: int, outputs: int) -> tuple[int, int, int]:
    """Return the programs of a launch: tiles of outputs, tiles of rows, and parts."""
    tiles = triton.cdiv(outputs, product.outputs), triton.cdiv(rows, product.rows)
    return *tiles, product.splits


def choose_product(
    rows: int, inputs: int, outputs: int, bits: int, device: torch.device, dtype: torch.dtype,
    row_invariant: bool = True,
) -> Product | None:  # fmt: skip
    """Return how the kernel runs; ``None`` for a product by cuBLAS.

    That is for float64, and for weights that are not quantised where no kernel starts early.
    Weights are streamed where ``choose_streamed`` or ``choose_streamed_plain`` finds a way. The
    parts and the sums of a part do not depend on the rows, if the product is row-invariant.

    ``torch._scaled_mm`` is not among the choices: it multiplies float8 with float8, so that rows
    would be rounded to eight bits, too. The result of a row would then depend on how many rows run
    with it, since few rows are not rounded, and texts would depend on the batch.

    Args:
        rows: Rows of the batch.
        inputs: Inputs of the weight.
        outputs: Outputs of the weight.
        bits: Bits of a number of the weight: 4, 8, or those of the dtype.
        device: The device of the rows.
        dtype: The dtype of the rows.
        row_invariant: As of ``quantized_linear``. Weights that are not quantised have no faster
            way.
    """
    processors, shared_bytes = multiprocessors(device)
    if bits > 8:
        starts_early = device.type != "cuda" or has_dependent_launch(device)
        if dtype == torch.float64 or not starts_early:
            return None
        if dtype == torch.float32:
            tiles = -(-outputs // TILE)
            splits = choose_splits(inputs, tiles, PLAIN_PROGRAMS * processors, bits, least=1)
            tile = min(64, max(16, triton.next_power_of_2(rows)))
            return TiledProduct(TILE, tile, splits, num_stages=2, early_bytes=0)
        is_divided = outputs % PLAIN_TILE == 0 and inputs % BLOCK == 0
        if is_divided and has_warpgroups(device):
            streamed = choose_streamed_plain(rows, inputs, outputs, processors, shared_bytes)
            if streamed is not None:
                return streamed
        tiles = -(-outputs // PLAIN_TILE)
        splits = choose_splits(inputs, tiles, PLAIN_PROGRAMS * processors, bits)
        tile = max(16, triton.next_power_of_2(min(rows, FEW_PLAIN_ROWS)))
        stages = 4 if tile <= 32 else 3
        return TiledProduct(PLAIN_TILE, tile, splits, num_stages=stages, early_bytes=256)
    if dtype == torch.float64:
        return None
    sizes = inputs, outputs, bits, processors, shared_bytes
    few: Product | None = None
    if dtype in DTYPES_OF_16_BITS and has_dependent_launch(device):
        few = choose_streamed(min(rows, FEW_ROWS), *sizes)
        few = few and replace(few, in_order=row_invariant)
    can_stream = few is not None and has_warpgroups(device)
    if few is None:
        few = _few_rows_in_tiles(rows, inputs, outputs, bits, processors, shared_bytes, dtype)
        if row_invariant and dtype in DTYPES_OF_16_BITS and has_warpgroups(device):
            # The instructions of a warp would add other groups of 16 inputs: a thread has four
            # consecutive numbers of eight bits, and those of a warpgroup two.
            few = replace(
                few, outputs=64, rows=max(16, few.rows), num_warps=4, num_stages=3, unroll=1
            )
    if dtype == torch.float32:
        return few
    if can_stream and LEAST_WARPGROUP_ROWS <= rows <= MOST_STREAMED_ROWS:
        splits, sums = few.splits, few.sums
        if not row_invariant:
            splits, sums = parts_of_many_rows(inputs, outputs, bits, processors) or splits, 1
        many = choose_streamed_by_warpgroups(splits, sums, rows, *sizes)
        if many is not None:
            return replace(many, in_order=row_invariant)
    if rows <= FEW_ROWS:
        return few
    tile, programs = (LARGE_TILE, 1) if bits == 8 else (LARGE_TILE // 2, 2)
    splits, sums = few.splits, few.sums
    if rows > MOST_ROWS:
        if not row_invariant:
            splits, sums = 1, 1
        return TiledProduct(
            LARGE_TILE, LARGE_TILE, splits, num_warps=8, num_stages=3, early_bytes=0, sums=sums,
            line_steps=blocks_of_step(bits), widens=True,
        )  # fmt: skip
    if not row_invariant:
        splits = choose_splits(inputs, -(-outputs // tile), programs * processors, bits)
        sums = 1
    return TiledProduct(tile, 64, splits, num_warps=tile // 16, num_stages=3, sums=sums)


def _few_rows_in_tiles(
    rows: int, inputs: int, outputs: int, bits: int, processors: int, shared_bytes: int,
    dtype: torch.dtype,
) -> TiledProduct:  # fmt: skip
    """Return how few rows, or any number in float32, run by ``linear_kernel``.

    The arguments are those of ``choose_product``, with what it knows of the device.
    """
    tiles, tile = -(-outputs // TILE), min(64, max(8, triton.next_power_of_2(rows)))
    splits = choose_splits(inputs, tiles, PROGRAMS[bits] * processors, bits)
    if dtype == torch.float32:
        return TiledProduct(TILE, max(16, tile), splits, num_warps=2, num_stages=2)
    programs = -(-tiles * splits // processors)
    step = blocks_of_step(bits)
    step_bytes = step * BLOCK * (TILE * bits // 8 + 2 * tile)
    most = (shared_bytes // programs - RESERVED_BYTES) // step_bytes
    in_flight = min(MOST_IN_FLIGHT // step, most)
    is_even = steps(inputs, bits) // splits % 2 == 0
    unroll = 2 if rows <= 16 and is_even and in_flight >= 4 else 1
    stages = 1 + max(1, in_flight // unroll)
    # 16 outputs for each warp: with more warps, two convert the same numbers.
    return TiledProduct(TILE, tile, splits, num_warps=2, num_stages=min(stages, 4), unroll=unroll)


def blocks_of_step(bits: int) -> int:
    """Return the blocks of inputs of a step of the loop, given the bits of a number."""
    return 2 if bits == 4 else 1


def steps(inputs: int, bits: int) -> int:
    """Return the steps of the loop over all inputs, given the bits of a number."""
    return pairs(inputs) if bits == 4 else blocks(inputs)


def choose_splits(
    inputs: int, tiles: int, programs: int, bits: int, least: int | None = None
) -> int:
    """Return the parts of the inputs that give at most so many programs; no part is empty.

    A part has whole steps. Parts of equal length are preferred: their loop has no conditions.

    Args:
        inputs: Inputs of the weight.
        tiles: Tiles of the outputs.
        programs: Programs that the device should get.
        bits: Bits of a number of the weight.
        least: Blocks that a part has at least, ``LEAST_BLOCKS`` by default.
    """
    least = LEAST_BLOCKS if least is None else least
    whole, least = steps(inputs, bits), max(1, least // blocks_of_step(bits))
    most = min(max(1, whole // least), max(1, programs // tiles))
    equal = max(parts for parts in range(1, most + 1) if whole % parts == 0)
    return equal if 2 * equal > most else -(-whole // -(-whole // most))
