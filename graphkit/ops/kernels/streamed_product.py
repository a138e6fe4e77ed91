"""A product whose weight streams through shared memory, and what divides every such product.

The numbers are for an H200. ``tools/bench/linear_chain.py --sweep`` compares others.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton

USUAL, LARGE = (64, 4, 4), (128, 8, 2)
"""Outputs of a program, warps of each line of 128 bytes, and most programs of a multiprocessor.
``even_outputs`` replaces the number of outputs where that divides the work evenly."""
OCCUPIED = 0.9
"""Least share of the multiprocessors that programs occupy, where other divisions of a weight are
possible."""
MOST_PARTS = 4
"""Most parts of a weight of 16 bits, or for many rows: the kernel behind it reads all of them."""
LEAST_LINES = 4
"""Least lines of a part."""
LINES_IN_SHARED_MEMORY = 3, 12
"""Least and most lines of each output that a program has in shared memory."""
EARLY_BYTES = 48 * 1024
"""Bytes of a weight that a multiprocessor has in flight while the kernel before runs, rounded up to
whole stages. They keep the memory busy. Behind more, the accesses of that kernel would wait."""
RESERVED_BYTES = 1024
"""Shared memory that CUDA keeps of each program on sm_90."""


@dataclass(frozen=True, slots=True)
class StreamedProduct:
    """How a launch of a kernel that streams a weight divides its work.

    Attributes:
        outputs: Outputs of a program, a multiple of 16. Shared memory has ``padded_outputs``.
        rows: Rows of a program, a power of two, at least 8.
        splits: Parts of the inputs, of the same number of lines.
        num_stages: Most steps in flight in a program, the current one included, at least 2. A part
            of few steps has fewer.
        num_warps: Warps of a program. Over quantised weights, each line of a step has an equal
            share of them.
        lines: Lines of each output in a step and in a stage, a power of two that divides the lines
            of a part.
        in_flight: Most stages of the weight in flight while the kernel before runs.
        sums: Sums of a part of a quantised weight, added at its end: line i of a part belongs to
            sum i modulo this number. Programs of warps have one for each line of a step.
        by_warpgroups: Whether the instructions of a warpgroup (``wgmma``) multiply a quantised
            weight, or those of a warp.
        in_order: Whether each instruction of a warp has 16 consecutive inputs of a quantised
            weight, as those of a warpgroup: such products with the same parts and sums have equal
            bits.
    """

    outputs: int
    rows: int
    splits: int
    num_stages: int
    num_warps: int = 4
    lines: int = 1
    in_flight: int = 2
    sums: int = 1
    by_warpgroups: bool = False
    in_order: bool = True

    @property
    def padded_outputs(self) -> int:
        """Outputs of a program, padded to a power of two."""
        return padded(self.outputs)


def even_outputs(outputs: int, splits: int, processors: int) -> int:
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


def padded(outputs: int) -> int:
    """Return outputs of a program, padded to a power of two."""
    power: int = triton.next_power_of_2(outputs)
    return power


def stages_in_flight(stage_bytes: int, programs: int) -> int:
    """Return the fewest stages that have ``EARLY_BYTES``.

    Args:
        stage_bytes: Bytes of a stage of the weight in a program.
        programs: Programs of a multiprocessor.
    """
    return -(-EARLY_BYTES // (stage_bytes * programs))
