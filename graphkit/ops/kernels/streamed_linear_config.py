"""How ``streamed_linear.py`` divides a product with a quantised weight.

The numbers below are for an H200. ``tools/bench/linear_chain.py --sweep`` compares others.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import ceil, gcd
from typing import NamedTuple

import triton

from graphkit.ops.kernels.streamed_product import (
    LARGE,
    LEAST_LINES,
    LINES_IN_SHARED_MEMORY,
    MOST_PARTS,
    OCCUPIED,
    RESERVED_BYTES,
    USUAL,
    StreamedProduct,
    even_outputs,
    padded,
    stages_in_flight,
)
from graphkit.ops.quantized_layout import BLOCK

FEW_ROWS = 32
"""Most rows that are multiplied by the instructions of a warp."""
LEAST_WARPGROUP_ROWS = 17
"""Least rows that are multiplied by the instructions of a warpgroup, where a device has these. They
read the rows from shared memory once for 64 outputs. A decoder layer of Llama-3.1-8B takes 76 us
for 32 rows in FP8 by these, and 91 us by the instructions of a warp; 16 rows take 73 us by both."""
MOST_STREAMED_ROWS = 64
"""Most rows for which a quantised weight streams. More rows run by ``linear_kernel``."""
WIDE_OF_4_BITS = ((32, 2, 7), (128, 4, 2))
"""As ``USUAL``, for weights of four bits with at least 128 outputs per multiprocessor, in
order of preference."""
WIDE_LINES = 5
"""Most lines in shared memory of weights of eight bits with as many outputs."""
MOST_LINES = {8: 28, 4: 8}
"""Most lines of a part by bits of a number, if such parts occupy the device."""
SHORT_LINES = 16
"""Most lines of a part over numbers of eight bits that as many warps as usual multiply."""
MOST_INPUTS = 16384
"""Most inputs of a part: shared memory holds the scales of all of them."""
BARRIER_BYTES = 256
"""Most shared memory that barriers take."""


class TilingCandidate(NamedTuple):
    """One tiling of a quantised weight.

    Attributes:
        outputs: Outputs of a program; 0 if the weight cannot be divided so.
        warps: Warps of each line.
        programs: Most programs of a multiprocessor.
        lines: Lines of a step.
        most_lines: Most lines of each output in shared memory.
        parts: Parts of the inputs.
    """

    outputs: int
    warps: int
    programs: int
    lines: int
    most_lines: int
    parts: int


def choose_streamed(
    rows: int, inputs: int, outputs: int, bits: int, processors: int, shared_bytes: int
) -> StreamedProduct | None:
    """Return how to stream a quantised weight for up to ``FEW_ROWS`` rows, or ``None``.

    There is none for lines that do not divide the weight into equal parts, and where the shared
    memory is too small. The number of rows changes neither whether there is one, nor the parts and
    the lines of a step, so that a row's result has the same bits for all these numbers.

    Args:
        rows: Rows of the batch.
        inputs: Inputs of the weight.
        outputs: Outputs of the weight.
        bits: Bits of a number of the weight: 4 or 8.
        processors: Multiprocessors of the device.
        shared_bytes: Bytes of shared memory of a multiprocessor.
    """
    if outputs % USUAL[0] or inputs * bits % 1024:
        return None
    lines, least_parts = inputs * bits // 1024, -(-inputs // MOST_INPUTS)
    candidates = _candidates_of_few_rows(lines, outputs, least_parts, processors, bits)
    sizes = inputs, outputs, bits, processors, shared_bytes
    found = _first_that_fits(candidates, rows, FEW_ROWS, *sizes)
    return found and replace(found, sums=found.lines)


def choose_streamed_by_warpgroups(
    splits: int, sums: int, rows: int, inputs: int, outputs: int, bits: int, processors: int,
    shared_bytes: int,
) -> StreamedProduct | None:  # fmt: skip
    """Return how to stream a weight for up to ``MOST_STREAMED_ROWS`` rows, or ``None``.

    A warp multiplies 16 outputs: a warpgroup has 64.

    Args:
        splits: Parts of the inputs.
        sums: Sums of a part.
        rows: Rows of the batch.
        inputs: Inputs of the weight.
        outputs: Outputs of the weight.
        bits: Bits of a number of the weight: 4 or 8.
        processors: Multiprocessors of the device.
        shared_bytes: Bytes of shared memory of a multiprocessor.
    """
    (tile, _, programs), (_, most_lines) = USUAL, LINES_IN_SHARED_MEMORY
    candidates = [TilingCandidate(tile, tile // 16, programs, 1, most_lines, splits)]
    if outputs >= 2 * tile * processors:
        even, (_, _, programs) = even_outputs(outputs, 1, processors), LARGE
        wide = TilingCandidate(even, padded(even) // 16, programs, 1, most_lines, splits)
        candidates.insert(0, wide)
    sizes = inputs, outputs, bits, processors, shared_bytes
    found = _first_that_fits(candidates, rows, MOST_STREAMED_ROWS, *sizes, by_warpgroups=True)
    return found and replace(found, sums=sums)


def parts_of_many_rows(inputs: int, outputs: int, bits: int, processors: int) -> int | None:
    """Return the parts that are fastest by warpgroups, or ``None``, if no parts are equal.

    Other numbers of rows are faster with other parts. These are not for row-invariant products.

    Args:
        inputs: Inputs of the weight.
        outputs: Outputs of the weight.
        bits: Bits of a number of the weight: 4 or 8.
        processors: Multiprocessors of the device.
    """
    lines, least = inputs * bits // 1024, -(-inputs // MOST_INPUTS)
    most = MOST_PARTS if outputs < USUAL[0] * processors else 1
    most = max(least, min(most, lines // LEAST_LINES))
    return max((parts for parts in range(least, most + 1) if lines % parts == 0), default=None)


def _first_that_fits(
    candidates: list[TilingCandidate], rows: int, most_rows: int, inputs: int, outputs: int,
    bits: int, processors: int, shared_bytes: int, by_warpgroups: bool = False,
) -> StreamedProduct | None:  # fmt: skip
    """Return the first tiling that fits into shared memory for ``most_rows``, for these rows.

    The other arguments are those of ``choose_streamed``, and which instructions multiply.
    """
    pieces = pieces_of_line(by_warpgroups, bits)
    lines, (least_lines, _) = inputs * bits // 1024, LINES_IN_SHARED_MEMORY
    for candidate in candidates:
        groups = groups_of_part(inputs, candidate.parts)
        fitting = partial(_fitting_stages, candidate, groups, bits, pieces)
        least_stages = max(2, least_lines // candidate.lines)
        is_divided = candidate.outputs > 0 and lines % (candidate.parts * candidate.lines) == 0
        if not is_divided or fitting(most_rows, shared_bytes) < least_stages:
            continue
        programs = min(
            -(-(outputs // candidate.outputs) * candidate.parts // processors), candidate.programs
        )
        tile_rows = max(8, triton.next_power_of_2(rows))
        stages = max(least_stages, fitting(tile_rows, shared_bytes // programs))
        stages = min(stages, candidate.most_lines // candidate.lines)
        warps = candidate.warps * candidate.lines
        stage_bytes = candidate.lines * 128 * candidate.outputs // pieces
        in_flight = stages_in_flight(stage_bytes, programs)
        return StreamedProduct(
            candidate.outputs, tile_rows, candidate.parts, stages, warps, candidate.lines,
            in_flight, by_warpgroups=by_warpgroups,
        )  # fmt: skip
    return None


def _candidates_of_few_rows(
    lines: int, outputs: int, least_parts: int, processors: int, bits: int
) -> list[TilingCandidate]:
    """Return tilings of a quantised weight for up to ``FEW_ROWS`` rows, the best first.

    If there are at least 128 outputs per multiprocessor, numbers of four bits take the programs of
    ``WIDE_OF_4_BITS`` that leave fewer multiprocessors idle in their last round. Numbers of eight
    bits take even shares of the multiprocessors.

    Args:
        lines: Lines of all inputs.
        outputs: Outputs of the weight.
        least_parts: Least parts of the inputs.
        processors: Multiprocessors of the device.
        bits: Bits of a number.
    """
    (tile, _, programs), (_, most_lines) = USUAL, LINES_IN_SHARED_MEMORY
    tiles = outputs // tile
    parts = _streamed_parts(tiles, lines, least_parts, bits, processors)
    if parts is None:
        return []
    warps, together = _warps_and_lines(-(-tiles * parts // processors), lines // parts, bits)
    candidates = [TilingCandidate(tile, warps, programs, together, most_lines, parts)]
    if outputs >= 2 * tile * processors:
        if bits == 4:
            wide = [TilingCandidate(*each, 1, most_lines, parts) for each in WIDE_OF_4_BITS]
            wide = [candidate for candidate in wide if outputs % candidate.outputs == 0]
            wide.sort(key=partial(_idle_share, outputs, processors))
        else:
            even, (_, warps, programs) = even_outputs(outputs, 1, processors), LARGE
            wide = [TilingCandidate(even, warps, programs, 1, WIDE_LINES, parts)]
        candidates = wide + candidates
    return candidates


def _idle_share(outputs: int, processors: int, candidate: TilingCandidate) -> float:
    """Return the share of a device that is idle while programs of a weight run, all equally long.

    Args:
        outputs: Outputs of the weight.
        processors: Multiprocessors of the device.
        candidate: How the weight is divided.
    """
    rounds = outputs / candidate.outputs / (candidate.programs * processors)
    return 1 - rounds / ceil(rounds)


def _warps_and_lines(programs: int, lines: int, bits: int) -> tuple[int, int]:
    """Return the warps of each line, and the lines that are multiplied at the same time.

    A multiprocessor with few programs has few warps to convert numbers. Parts of many lines are
    limited by memory: warps of their own for each line keep more of them in flight. A line of four
    bits has twice as many numbers, which occupy its warps for longer.

    Args:
        programs: Programs of a multiprocessor.
        lines: Lines of a part.
        bits: Bits of a number.
    """
    _, warps, _ = USUAL
    together = gcd(lines, (4 if programs == 1 else 2) * bits // 8)
    is_long = programs > 1 and lines > SHORT_LINES
    return warps // 2 if is_long and together == 2 else warps, together


def _fitting_stages(
    candidate: TilingCandidate, groups: int, bits: int, pieces: int, rows: int, shared_bytes: int
) -> int:
    """Return the stages of a program that fit into shared memory, beside its scales."""
    outputs = padded(candidate.outputs)
    table_bytes = (6 if bits == 4 else 4) * outputs * groups  # of 32 bits, and 16 of a zero point
    stage_bytes = candidate.lines * (outputs * 128 + 2 * rows * 1024 // bits) // pieces
    return (shared_bytes - RESERVED_BYTES - BARRIER_BYTES - table_bytes) // stage_bytes


def _streamed_parts(tiles: int, lines: int, least: int, bits: int, processors: int) -> int | None:
    """Return into how many equal parts the lines are divided, at least ``least``.

    The result is the smallest number whose parts occupy the device and have at most ``MOST_LINES``
    each, since the next kernel reads all parts. If there is none, it is the largest number.
    """
    most, (_, _, most_programs) = 1, USUAL
    if tiles < processors:
        most = max(1, min(lines // LEAST_LINES, most_programs * processors // tiles))
    equal = [parts for parts in range(least, max(least, most) + 1) if lines % parts == 0]
    for parts in equal:
        rounds = -(-tiles * parts // processors)
        is_even = tiles * parts >= OCCUPIED * rounds * processors
        if is_even and lines // parts <= MOST_LINES[bits]:
            return parts
    return equal[-1] if equal else None


def groups_of_part(inputs: int, splits: int) -> int:
    """Return the groups of a part of the inputs, rounded up to a power of two."""
    groups: int = triton.next_power_of_2(max(1, inputs // splits // BLOCK))
    return groups


def pieces_of_line(by_warpgroups: bool, bits: int) -> int:
    """Return the pieces of a line of a weight, each of which is a stage.

    The inputs of many rows fill shared memory: a stage of warpgroups has 128 of them. A line of
    four bits has twice as many.

    Args:
        by_warpgroups: Whether the instructions of a warpgroup multiply.
        bits: Bits of a number.
    """
    return 2 if by_warpgroups and bits == 4 else 1
