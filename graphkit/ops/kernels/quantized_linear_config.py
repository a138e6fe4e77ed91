"""How ``quantized_linear`` and ``linear`` run: the one place that chooses."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import gcd

import torch
import triton

from graphkit.ops.kernels.devices import has_dependent_launch, has_warpgroups, multiprocessors
from graphkit.ops.quantized_layout import BLOCK, blocks, pairs

DTYPES_OF_16_BITS = torch.bfloat16, torch.float16
"""Dtypes of rows that are multiplied in 16 bits."""
MOST_ROWS = 256
"""Most rows of the kernel. More are limited by arithmetic, where cuBLAS over a dequantised weight
is faster: writing and reading that weight takes the time of the products of about 460 rows on an
H200 (five bytes per weight at 4.3 TB/s, two operations per weight and row at 790 TFLOP/s)."""
FEW_ROWS = 32
"""Most rows whose products run by the instructions of a warp, which add inputs in an order of their
own: up to that many rows, a row's result has the same bits whatever the number of rows. More run by
the instructions of a warpgroup, which are faster there
(``tools/bench/results/quantized_linear_sweep.json``)."""
TILE, LARGE_TILE = 32, 128
"""Outputs of a program of few rows, 4 KiB of numbers per step of its loop, and of more rows. Over
numbers of four bits, two programs of a multiprocessor have half of the larger tile each: their
registers and shared memory leave no room for a third."""
PROGRAMS = {8: 6, 4: 8}
"""Programs of a multiprocessor for few rows that do not stream, by the bits of a number
(``tools/bench/results/quantized_linear_sweep.json``)."""
MOST_IN_FLIGHT, RESERVED_BYTES = 6, 1024
"""Most blocks of inputs that a program of few rows has in flight, and the shared memory that CUDA
keeps of each program on sm_90. A program has fewer blocks in flight where otherwise not all
programs would run at the same time: for 8 rows in FP8 the gate and up projection takes 35 us
instead of 44 us (``tools/bench/results/quantized_linear_sweep.json``)."""
MOST_PLAIN_ROWS = 64
"""Most rows of the kernels over a weight of 16 bits. On an H200, a decoder layer of Llama-3.1-8B
takes 0.88 to 0.93 of its time with cuBLAS for up to 64 rows
(``tools/bench/results/linear_chain.json``). More rows run by cuBLAS."""
PLAIN_TILE, PLAIN_PROGRAMS = 64, 2
"""Outputs of a program over a weight of 16 bits, and programs of a multiprocessor. A layer without
attention takes 117 us for one row with these, 146 us with 32 outputs and four programs, and 123 us
by cuBLAS (``tools/bench/results/linear_chain_tiles.json``)."""
LEAST_BLOCKS = 4
"""Least blocks of inputs of a part: below that, adding the parts costs more than it saves."""
STREAMED_TILE, STREAMED_PROGRAMS, LEAST_LINES = (64, 4), 4, 4
"""Outputs of a program that streams its weight, warps of each line of 128 bytes, most programs of a
multiprocessor, and least lines of a part. ``tools/bench/linear_chain.py --sweep`` compares
others."""
STREAMED_OCCUPIED = 0.9
"""Least share of the multiprocessors that programs occupy, where other divisions of a weight are
possible."""
STREAMED_MOST_LINES = 28
"""Most lines of a part over numbers of eight bits."""
STREAMED_MANY_OUTPUTS = {8: (64, 4, 4, 2), 4: (32, 2, 7, 1)}
"""By the bits of a number, for weights with at least 128 outputs per multiprocessor: outputs of a
program, warps of each line, most programs of a multiprocessor, and lines of a step."""
STREAMED_SHORT_LINES = 16
"""Most lines of a part over numbers of eight bits that are multiplied two at a time."""
STREAMED_PLAIN, STREAMED_PLAIN_LARGE = (64, 4, 4), (128, 8, 2)
"""Outputs and warps of a program that streams a weight of 16 bits, and most programs of a
multiprocessor: usually, and for weights of many inputs or outputs. ``_even_outputs`` replaces the
number of outputs where that divides the work evenly. ``tools/bench/linear_chain.py --sweep``
compares other values."""
STREAMED_PLAIN_PARTS, LONG_INPUTS = 4, 8192
"""Most parts of a weight of 16 bits, since the kernel behind it reads all of them, and most inputs
of a weight that may have two parts. It has two if each multiprocessor then gets a program of at
least as many outputs as usual."""
STREAMED_INPUTS = 16384
"""Most inputs of a part: shared memory holds the scales of all of them."""
LINES_IN_SHARED_MEMORY = 3, 12
"""Least and most lines of each output that a program has in shared memory.
``tools/bench/linear_chain.py --sweep`` compares other numbers."""


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
    """

    outputs: int
    rows: int
    splits: int
    num_warps: int = 4
    num_stages: int = 4
    unroll: int = 1
    early_bytes: int = 512

    @property
    def is_warpgroup(self) -> bool:
        """Whether Triton multiplies by the instructions of a warpgroup (``wgmma``)."""
        return self.num_warps % 4 == 0 and self.outputs % 64 == 0 and self.rows >= 16

    @property
    def pack(self) -> int:
        """Consecutive numbers of a row in a register."""
        return 2 if self.is_warpgroup else 4


@dataclass(frozen=True, slots=True)
class StreamedProduct:
    """How a launch of a kernel of ``streamed_linear.py`` divides its work.

    Attributes:
        outputs: Outputs of a program, a multiple of 16. Shared memory has ``padded_outputs``.
        rows: Rows of a program, a power of two, at least 8.
        splits: Parts of the inputs, of the same number of lines.
        num_stages: Most steps in flight in a program, the current one included. A part of few steps
            has one stage more than steps, or two for a weight of 16 bits.
        num_warps: Warps of a program, the same number for each line of a step.
        lines: Lines of each output that a step multiplies, a power of two that divides the lines of
            a part; 1 for a weight of 16 bits. A stage has as many.
    """

    outputs: int
    rows: int
    splits: int
    num_stages: int
    num_warps: int = 4
    lines: int = 1

    @property
    def padded_outputs(self) -> int:
        """Outputs of a program, padded to a power of two, at least 16 for each warp."""
        return padded(self.outputs)


Product = TiledProduct | StreamedProduct
"""How a launch divides its work."""


def choose_product(
    rows: int, inputs: int, outputs: int, bits: int, device: torch.device, dtype: torch.dtype
) -> Product | None:
    """Return how the kernel runs; ``None`` for a product by cuBLAS.

    cuBLAS multiplies by the weight in the dtype of the rows, which is dequantised before. A weight
    of 16 bits is multiplied by the kernel where the kernel can start early and its tiles divide the
    weight. Weights are streamed where ``choose_streamed`` or ``choose_streamed_plain`` finds a way.

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
    """
    processors, shared_bytes = multiprocessors(device)
    if bits <= 8 and dtype in DTYPES_OF_16_BITS and has_dependent_launch(device):
        streamed = choose_streamed(rows, inputs, outputs, bits, processors, shared_bytes)
        if streamed is not None:
            return streamed
    if bits > 8:
        starts_early = device.type != "cuda" or has_dependent_launch(device)
        is_divided = outputs % PLAIN_TILE == 0 and inputs % BLOCK == 0
        if bits > 16 or rows > MOST_PLAIN_ROWS or not (starts_early and is_divided):
            return None
        if has_warpgroups(device):
            streamed = choose_streamed_plain(rows, inputs, outputs, processors, shared_bytes)
            if streamed is not None:
                return streamed
        splits = choose_splits(inputs, outputs // PLAIN_TILE, PLAIN_PROGRAMS * processors, bits)
        tile = max(16, triton.next_power_of_2(rows))
        stages = 4 if tile <= 32 else 3
        return TiledProduct(PLAIN_TILE, tile, splits, num_stages=stages, early_bytes=256)
    if rows > MOST_ROWS or dtype == torch.float64:
        return None
    if rows > FEW_ROWS and dtype != torch.float32:
        tile, programs = (LARGE_TILE, 1) if bits == 8 else (LARGE_TILE // 2, 2)
        splits = choose_splits(inputs, -(-outputs // tile), programs * processors, bits)
        return TiledProduct(tile, 64, splits, num_warps=tile // 16, num_stages=3)
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


def choose_streamed(
    rows: int, inputs: int, outputs: int, bits: int, processors: int, shared_bytes: int
) -> StreamedProduct | None:
    """Return how to stream a weight, or ``None``.

    There is no way for too many rows, for lines that do not divide the weight into equal parts, and
    where the shared memory is too small. Whether there is a way, the number of parts, and the lines
    of a step are the same for all numbers of rows up to ``FEW_ROWS``: a row's result has the same
    bits whatever the number of rows.

    Args:
        rows: Rows of the batch.
        inputs: Inputs of the weight.
        outputs: Outputs of the weight.
        bits: Bits of a number of the weight: 4 or 8.
        processors: Multiprocessors of the device.
        shared_bytes: Bytes of shared memory of a multiprocessor.
    """
    inputs_of_line, (tile, _) = 1024 // bits, STREAMED_TILE
    if rows > FEW_ROWS or outputs % tile or inputs % inputs_of_line:
        return None
    tiles, lines = outputs // tile, inputs // inputs_of_line
    parts = _streamed_parts(tiles, lines, -(-inputs // STREAMED_INPUTS), bits, processors)
    if parts is None:
        return None
    step_lines = _step_lines(-(-tiles * parts // processors), lines // parts, bits)
    ways = [(*STREAMED_TILE, STREAMED_PROGRAMS, step_lines)]
    if outputs >= 2 * tile * processors and outputs % STREAMED_MANY_OUTPUTS[bits][0] == 0:
        ways.insert(0, STREAMED_MANY_OUTPUTS[bits])
    for tile, warps, most_programs, step_lines in ways:
        least_stages, most_stages = (each // step_lines for each in LINES_IN_SHARED_MEMORY)
        least_stages = max(2, least_stages)
        fitting = partial(_fitting_stages, tile, groups_of_part(inputs, parts), bits, step_lines)
        is_divided = lines % (parts * step_lines) == 0
        if not is_divided or fitting(FEW_ROWS, shared_bytes) < least_stages:
            continue
        programs = min(-(-(outputs // tile) * parts // processors), most_programs)
        tile_rows = max(8, triton.next_power_of_2(rows))
        stages = max(least_stages, fitting(tile_rows, shared_bytes // programs))
        stages = min(stages, most_stages)
        return StreamedProduct(tile, tile_rows, parts, stages, warps * step_lines, step_lines)
    return None


def choose_streamed_plain(
    rows: int, inputs: int, outputs: int, processors: int, shared_bytes: int
) -> StreamedProduct | None:
    """Return how to stream a weight of 16 bits, or ``None``.

    The number of parts does not depend on the rows, so that a row's result has the same bits
    whatever the number of rows. A weight with a tile for every multiprocessor has one part.

    Args:
        rows: Rows of the batch, at most ``MOST_PLAIN_ROWS``.
        inputs: Inputs of the weight, a multiple of 64.
        outputs: Outputs of the weight, a multiple of 64.
        processors: Multiprocessors of the device.
        shared_bytes: Bytes of shared memory of a multiprocessor.
    """
    lines, (tile, warps, most_programs) = inputs // 64, STREAMED_PLAIN
    most = min(STREAMED_PLAIN_PARTS, lines // LEAST_LINES)
    if most == 0:
        return None
    splits = max(parts for parts in range(1, most + 1) if lines % parts == 0)
    is_wide, is_long = outputs >= tile * processors, inputs > LONG_INPUTS
    even = _even_outputs(outputs, 1 if is_wide else 2, processors)
    if is_wide:
        _, warps, most_programs = STREAMED_PLAIN_LARGE
        tile, splits = even, 1
    elif even >= tile and splits % 2 == 0 and not is_long:
        tile, splits = even, 2
    elif outputs // tile * splits < processors:
        return None
    elif is_long:
        tile, warps, most_programs = STREAMED_PLAIN_LARGE
    if tile == 0 or outputs % tile:
        return None
    programs = min(-(-(outputs // tile) * splits // processors), most_programs)
    tile_rows = max(16, triton.next_power_of_2(rows))
    line_bytes = 128 * (padded(tile) + tile_rows)
    stages = (shared_bytes // programs - RESERVED_BYTES) // line_bytes
    least_stages, most_stages = LINES_IN_SHARED_MEMORY
    if stages < least_stages:
        return None
    return StreamedProduct(tile, tile_rows, splits, min(stages, most_stages), warps)


def _even_outputs(outputs: int, splits: int, processors: int) -> int:
    """Return the outputs of a program that divide a weight evenly among all multiprocessors.

    Each multiprocessor gets as few programs as ``STREAMED_PLAIN_LARGE`` allows, which limits the
    outputs of a program. These are a multiple of 16 that divides the outputs of the weight. If no
    number occupies enough multiprocessors, the result is 0.

    Args:
        outputs: Outputs of the weight.
        splits: Parts of the inputs.
        processors: Multiprocessors of the device.
    """
    most, _, _ = STREAMED_PLAIN_LARGE
    programs = processors * -(-outputs * splits // (most * processors))
    for each in range(16, most + 1, 16):
        tiles, rest = divmod(outputs, each)
        if rest == 0 and STREAMED_OCCUPIED * programs <= tiles * splits <= programs:
            return each
    return 0


def _step_lines(programs: int, lines: int, bits: int) -> int:
    """Return how many lines of a part are multiplied at the same time, each by warps of its own.

    A multiprocessor with few programs over numbers of eight bits has few warps to convert them.
    Parts of many lines are limited by memory. Weights of four bits have more parts, and thus warps.

    Args:
        programs: Programs of a multiprocessor.
        lines: Lines of a part.
        bits: Bits of a number.
    """
    if bits == 4:
        return 1
    return gcd(lines, 4 if programs == 1 else 2 if lines <= STREAMED_SHORT_LINES else 1)


def _fitting_stages(
    tile: int, groups: int, bits: int, lines: int, rows: int, shared_bytes: int
) -> int:
    """Return the stages of a program that fit into shared memory, beside its scales."""
    table_bytes = (6 if bits == 4 else 4) * tile * groups  # of 32 bits, and 16 of a zero point
    stage_bytes = lines * (tile * 128 + 2 * rows * 1024 // bits)
    return (shared_bytes - RESERVED_BYTES - table_bytes) // stage_bytes


def _streamed_parts(tiles: int, lines: int, least: int, bits: int, processors: int) -> int | None:
    """Return the equal parts of lines that give the device enough programs, at least ``least``.

    Numbers of eight bits take the fewest parts that occupy the device, since the next kernel reads
    all of them. Numbers of four bits take the most parts, so that more warps convert them.
    """
    most = 1
    if tiles < processors:
        most = max(1, min(lines // LEAST_LINES, STREAMED_PROGRAMS * processors // tiles))
    equal = [parts for parts in range(least, max(least, most) + 1) if lines % parts == 0]
    if bits == 8:
        for parts in equal:
            rounds = -(-tiles * parts // processors)
            is_even = tiles * parts >= STREAMED_OCCUPIED * rounds * processors
            if is_even and lines // parts <= STREAMED_MOST_LINES:
                return parts
    return equal[-1] if equal else None


def padded(outputs: int) -> int:
    """Return outputs of a program, padded to a power of two."""
    power: int = triton.next_power_of_2(outputs)
    return power


def groups_of_part(inputs: int, splits: int) -> int:
    """Return the groups of a part of the inputs, rounded up to a power of two."""
    groups: int = triton.next_power_of_2(max(1, inputs // splits // BLOCK))
    return groups


def blocks_of_step(bits: int) -> int:
    """Return the blocks of inputs of a step of the loop, given the bits of a number."""
    return 2 if bits == 4 else 1


def steps(inputs: int, bits: int) -> int:
    """Return the steps of the loop over all inputs, given the bits of a number."""
    return pairs(inputs) if bits == 4 else blocks(inputs)


def choose_splits(inputs: int, tiles: int, programs: int, bits: int) -> int:
    """Return the parts of the inputs that give at most so many programs; no part is empty.

    A part has whole steps. Parts of equal length are preferred: their loop has no conditions.

    Args:
        inputs: Inputs of the weight.
        tiles: Tiles of the outputs.
        programs: Programs that the device should get.
        bits: Bits of a number of the weight.
    """
    whole, least = steps(inputs, bits), max(1, LEAST_BLOCKS // blocks_of_step(bits))
    most = min(max(1, whole // least), max(1, programs // tiles))
    equal = max(parts for parts in range(1, most + 1) if whole % parts == 0)
    return equal if 2 * equal > most else -(-whole // -(-whole // most))
