"""How ``streamed_plain.py`` divides a product with a weight of 16 bits.

The numbers below are for an H200. ``tools/bench/linear_chain.py --sweep`` compares others.
"""

from __future__ import annotations

from itertools import product
from math import gcd

import triton

from graphkit.ops.kernels.streamed_product import (
    LARGE,
    LEAST_LINES,
    LINES_IN_SHARED_MEMORY,
    MOST_PARTS,
    RESERVED_BYTES,
    USUAL,
    StreamedProduct,
    even_outputs,
    padded,
    stages_in_flight,
)

FEW_PLAIN_ROWS = 64
"""Rows up to which the kernels over a weight of 16 bits are faster than cuBLAS. On an H200, a
decoder layer of Llama-3.1-8B takes 0.84 to 0.89 of its time with cuBLAS
(``tools/bench/results/linear_chain.json``)."""
MOST_TILE_ROWS = 256
"""Most rows of a program, those of an instruction of a warpgroup (``wgmma``)."""
LONG_INPUTS = 8192
"""Most inputs of a weight that may have fewer parts than ``MOST_PARTS``."""


def choose_streamed_plain(
    rows: int, inputs: int, outputs: int, processors: int, shared_bytes: int
) -> StreamedProduct | None:
    """Return how to stream a weight of 16 bits, or ``None``.

    The number of parts does not depend on the rows, so that a row's result has the same bits
    whatever the number of rows. A weight with a tile for every multiprocessor has one part; others
    are divided by ``_tile_and_parts``. A step has two lines if two such steps fit: it reads 256
    consecutive bytes, and the program waits half as often.

    Args:
        rows: Rows of the batch.
        inputs: Inputs of the weight, a multiple of 64.
        outputs: Outputs of the weight, a multiple of 64.
        processors: Multiprocessors of the device.
        shared_bytes: Bytes of shared memory of a multiprocessor.
    """
    lines, (tile, warps, most_programs) = inputs // 64, USUAL
    most = min(MOST_PARTS, lines // LEAST_LINES)
    if most == 0:
        return None
    splits = max(parts for parts in range(1, most + 1) if lines % parts == 0)
    is_wide, is_long = outputs >= tile * processors, inputs > LONG_INPUTS
    if is_wide or is_long:
        _, warps, most_programs = LARGE
    if is_wide:
        tile, splits = even_outputs(outputs, 1, processors), 1
    else:
        tile, splits = _tile_and_parts(outputs, splits, is_long, processors)
    if tile == 0 or outputs % tile:
        return None
    tile_rows = min(max(16, triton.next_power_of_2(rows)), MOST_TILE_ROWS)
    if tile_rows == MOST_TILE_ROWS:
        warps = LARGE[1]  # the sums of a tile would not fit into the registers of fewer warps
    warps = min(warps, padded(tile) // 16)
    most_programs = min(-(-(outputs // tile) * splits // processors), most_programs)
    least_lines, most_lines = LINES_IN_SHARED_MEMORY
    steps = dict.fromkeys((gcd(lines // splits, 2), 1))
    for programs, step_lines in product(range(most_programs, 0, -1), steps):
        stage_bytes = step_lines * 128 * (padded(tile) + tile_rows)
        stages = (shared_bytes // programs - RESERVED_BYTES) // stage_bytes
        if stages >= 2 and stages * step_lines >= least_lines:
            stages = min(stages, most_lines // step_lines)
            in_flight = stages_in_flight(step_lines * 128 * tile, programs)
            return StreamedProduct(tile, tile_rows, splits, stages, warps, step_lines, in_flight)
    return None


def _tile_and_parts(
    outputs: int, most_parts: int, is_long: bool, processors: int
) -> tuple[int, int]:
    """Return the outputs of a program, and the parts of a weight that is not wide.

    These are the fewest parts for which programs of at least as many outputs as usual divide the
    weight evenly. If there are none, programs have a fixed size, and the outputs are 0 if these do
    not occupy the device.

    Args:
        outputs: Outputs of the weight.
        most_parts: Most equal parts of its inputs.
        is_long: Whether it has more than ``LONG_INPUTS`` inputs.
        processors: Multiprocessors of the device.
    """
    tile = USUAL[0]
    for parts in (MOST_PARTS,) if is_long else (2, MOST_PARTS):
        even = even_outputs(outputs, parts, processors)
        if even >= tile and most_parts % parts == 0:
            return even, parts
    if outputs // tile * most_parts < processors:
        return 0, 0
    return LARGE[0] if is_long else tile, most_parts
