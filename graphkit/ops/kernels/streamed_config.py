"""How the kernels of ``streamed_linear.py`` and ``streamed_plain.py`` divide a product.

The numbers below are for an H200. ``tools/bench/linear_chain.py --sweep`` compares others.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import gcd
from typing import NamedTuple

import triton

from graphkit.ops.quantized_layout import BLOCK

FEW_ROWS = 32
"""Most rows whose products with quantised weights run by the instructions of a warp, which add
inputs in an order of their own: up to that many rows, a row's result has the same bits whatever the
number of rows. More run by the instructions of a warpgroup, which are faster there
(``tools/bench/results/quantized_linear_sweep.json``)."""
MOST_PLAIN_ROWS = 64
"""Most rows of the kernels over a weight of 16 bits. On an H200, a decoder layer of Llama-3.1-8B
takes 0.86 to 0.90 of its time with cuBLAS for up to 64 rows
(``tools/bench/results/linear_chain.json``). More rows run by cuBLAS."""
RESERVED_BYTES, BARRIER_BYTES = 1024, 256
"""Shared memory that CUDA keeps of each program on sm_90, and most that barriers take."""
USUAL, LARGE = (64, 4, 4), (128, 8, 2)
"""Outputs of a program, warps of each line of 128 bytes, and most programs of a multiprocessor.
``_even_outputs`` replaces the number of outputs where that divides the work evenly."""
WIDE_OF_4_BITS = 32, 2, 7
"""As ``USUAL``, for weights of four bits with at least 128 outputs per multiprocessor."""
WIDE_LINES = 5
"""Most lines in shared memory of weights of eight bits with as many outputs."""
OCCUPIED = 0.9
"""Least share of the multiprocessors that programs occupy, where other divisions of a weight are
possible."""
LEAST_LINES, MOST_LINES = 4, 28
"""Least lines of a part, and most over numbers of eight bits."""
SHORT_LINES = 16
"""Most lines of a part over numbers of eight bits that as many warps as usual multiply."""
PLAIN_PARTS, LONG_INPUTS = 4, 8192
"""Most parts of a weight of 16 bits, since the kernel behind it reads all of them, and most inputs
of a weight that may have two parts. It has two if each multiprocessor then gets a program of at
least as many outputs as usual."""
MOST_INPUTS = 16384
"""Most inputs of a part: shared memory holds the scales of all of them."""
LINES_IN_SHARED_MEMORY = 3, 12
"""Least and most lines of each output that a program has in shared memory."""


@dataclass(frozen=True, slots=True)
class StreamedProduct:
    """How a launch of a kernel that streams a weight divides its work.

    Attributes:
        outputs: Outputs of a program, a multiple of 16. Shared memory has ``padded_outputs``.
        rows: Rows of a program, a power of two, at least 8.
        splits: Parts of the inputs, of the same number of lines.
        num_stages: Most steps in flight in a program, the current one included, at least 2. A part
            of few steps has one stage more than steps.
        num_warps: Warps of a program. Over quantised weights, each line of a step has as many.
        lines: Lines of each output that a step multiplies, a power of two that divides the lines of
            a part. A stage has as many.
    """

    outputs: int
    rows: int
    splits: int
    num_stages: int
    num_warps: int = 4
    lines: int = 1

    @property
    def padded_outputs(self) -> int:
        """Outputs of a program, padded to a power of two."""
        return padded(self.outputs)


class _Way(NamedTuple):
    """A way to divide a quantised weight.

    Attributes:
        outputs: Outputs of a program; 0 if the weight cannot be divided so.
        warps: Warps of each line.
        programs: Most programs of a multiprocessor.
        lines: Lines of a step.
        most_lines: Most lines of each output in shared memory.
    """

    outputs: int
    warps: int
    programs: int
    lines: int
    most_lines: int


def choose_streamed(
    rows: int, inputs: int, outputs: int, bits: int, processors: int, shared_bytes: int
) -> StreamedProduct | None:
    """Return how to stream a quantised weight, or ``None``.

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
    inputs_of_line, (tile, _, programs) = 1024 // bits, USUAL
    if rows > FEW_ROWS or outputs % tile or inputs % inputs_of_line:
        return None
    tiles, lines = outputs // tile, inputs // inputs_of_line
    parts = _streamed_parts(tiles, lines, -(-inputs // MOST_INPUTS), bits, processors)
    if parts is None:
        return None
    warps, step_lines = _warps_and_lines(-(-tiles * parts // processors), lines // parts, bits)
    least_lines, most_lines = LINES_IN_SHARED_MEMORY
    ways = [_Way(tile, warps, programs, step_lines, most_lines)]
    if outputs >= 2 * tile * processors:
        ways.insert(0, _wide_way(outputs, bits, processors))
    for way in ways:
        fitting = partial(_fitting_stages, way, groups_of_part(inputs, parts), bits)
        least_stages = max(2, least_lines // way.lines)
        is_divided = way.outputs > 0 and lines % (parts * way.lines) == 0
        if not is_divided or fitting(FEW_ROWS, shared_bytes) < least_stages:
            continue
        programs = min(-(-(outputs // way.outputs) * parts // processors), way.programs)
        tile_rows = max(8, triton.next_power_of_2(rows))
        stages = max(least_stages, fitting(tile_rows, shared_bytes // programs))
        stages = min(stages, way.most_lines // way.lines)
        warps = way.warps * way.lines
        return StreamedProduct(way.outputs, tile_rows, parts, stages, warps, way.lines)
    return None


def choose_streamed_plain(
    rows: int, inputs: int, outputs: int, processors: int, shared_bytes: int
) -> StreamedProduct | None:
    """Return how to stream a weight of 16 bits, or ``None``.

    The number of parts does not depend on the rows, so that a row's result has the same bits
    whatever the number of rows. A weight with a tile for every multiprocessor has one part. A step
    has two lines if two such steps fit: it reads 256 consecutive bytes, and the program waits half
    as often.

    Args:
        rows: Rows of the batch, at most ``MOST_PLAIN_ROWS``.
        inputs: Inputs of the weight, a multiple of 64.
        outputs: Outputs of the weight, a multiple of 64.
        processors: Multiprocessors of the device.
        shared_bytes: Bytes of shared memory of a multiprocessor.
    """
    lines, (tile, warps, most_programs) = inputs // 64, USUAL
    most = min(PLAIN_PARTS, lines // LEAST_LINES)
    if most == 0:
        return None
    splits = max(parts for parts in range(1, most + 1) if lines % parts == 0)
    is_wide, is_long = outputs >= tile * processors, inputs > LONG_INPUTS
    even = _even_outputs(outputs, 1 if is_wide else 2, processors)
    if is_wide:
        _, warps, most_programs = LARGE
        tile, splits = even, 1
    elif even >= tile and splits % 2 == 0 and not is_long:
        tile, splits = even, 2
    elif outputs // tile * splits < processors:
        return None
    elif is_long:
        tile, warps, most_programs = LARGE
    if tile == 0 or outputs % tile:
        return None
    programs = min(-(-(outputs // tile) * splits // processors), most_programs)
    tile_rows = max(16, triton.next_power_of_2(rows))
    least_lines, most_lines = LINES_IN_SHARED_MEMORY
    for step_lines in dict.fromkeys((gcd(lines // splits, 2), 1)):
        stage_bytes = step_lines * 128 * (padded(tile) + tile_rows)
        stages = (shared_bytes // programs - RESERVED_BYTES) // stage_bytes
        if stages >= 2 and stages * step_lines >= least_lines:
            stages = min(stages, most_lines // step_lines)
            return StreamedProduct(tile, tile_rows, splits, stages, warps, step_lines)
    return None


def _wide_way(outputs: int, bits: int, processors: int) -> _Way:
    """Return the way for a weight with at least 128 outputs per multiprocessor.

    Numbers of four bits take many small programs, which convert them while others wait. Numbers of
    eight bits take even shares of the multiprocessors.
    """
    if bits == 4:
        return _Way(*WIDE_OF_4_BITS, lines=1, most_lines=LINES_IN_SHARED_MEMORY[1])
    _, warps, programs = LARGE
    even = _even_outputs(outputs, 1, processors)
    return _Way(even, warps, programs, lines=1, most_lines=WIDE_LINES)


def _even_outputs(outputs: int, splits: int, processors: int) -> int:
    """Return the outputs of a program that divide a weight evenly among all multiprocessors.

    Each multiprocessor gets as few programs as ``LARGE`` allows, which limits the outputs of a
    program. These are a multiple of 16 that divides the outputs of the weight. If no number
    occupies enough multiprocessors, the result is 0.

    Args:
        outputs: Outputs of the weight.
        splits: Parts of the inputs.
        processors: Multiprocessors of the device.
    """
    most, _, _ = LARGE
    programs = processors * -(-outputs * splits // (most * processors))
    for each in range(16, most + 1, 16):
        tiles, rest = divmod(outputs, each)
        if rest == 0 and OCCUPIED * programs <= tiles * splits <= programs:
            return each
    return 0


def _warps_and_lines(programs: int, lines: int, bits: int) -> tuple[int, int]:
    """Return the warps of each line, and the lines that are multiplied at the same time.

    A multiprocessor with few programs over numbers of eight bits has few warps to convert them.
    Parts of many lines are limited by memory: warps of their own for each line keep more of them in
    flight. Weights of four bits have more parts, and thus warps.

    Args:
        programs: Programs of a multiprocessor.
        lines: Lines of a part.
        bits: Bits of a number.
    """
    _, warps, _ = USUAL
    if bits == 4:
        return warps, 1
    together = gcd(lines, 4 if programs == 1 else 2)
    is_long = programs > 1 and lines > SHORT_LINES
    return warps // 2 if is_long and together == 2 else warps, together


def _fitting_stages(way: _Way, groups: int, bits: int, rows: int, shared_bytes: int) -> int:
    """Return the stages of a program that fit into shared memory, beside its scales."""
    outputs = padded(way.outputs)
    table_bytes = (6 if bits == 4 else 4) * outputs * groups  # of 32 bits, and 16 of a zero point
    stage_bytes = way.lines * (outputs * 128 + 2 * rows * 1024 // bits)
    return (shared_bytes - RESERVED_BYTES - BARRIER_BYTES - table_bytes) // stage_bytes


def _streamed_parts(tiles: int, lines: int, least: int, bits: int, processors: int) -> int | None:
    """Return the equal parts of lines that give the device enough programs, at least ``least``.

    Numbers of eight bits take the fewest parts that occupy the device, since the next kernel reads
    all of them. Numbers of four bits take the most parts, so that more warps convert them.
    """
    most, (_, _, most_programs) = 1, USUAL
    if tiles < processors:
        most = max(1, min(lines // LEAST_LINES, most_programs * processors // tiles))
    equal = [parts for parts in range(least, max(least, most) + 1) if lines % parts == 0]
    if bits == 8:
        for parts in equal:
            rounds = -(-tiles * parts // processors)
            is_even = tiles * parts >= OCCUPIED * rounds * processors
            if is_even and lines // parts <= MOST_LINES:
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
