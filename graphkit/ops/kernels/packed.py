"""What the kernels over packed rows share. Packed: see ``graphkit.ops.packed``."""

import triton
import triton.language as tl

COUNTS = tl.constexpr(256)
RUN = tl.constexpr(128)


@triton.jit
def total_before(counts, end, plus: tl.constexpr):
    """Sum of the first ``end`` counts, ``plus`` added to each; one below 0 counts as 0."""
    each = tl.arange(0, COUNTS)
    totals = tl.zeros([COUNTS], tl.int64)
    for first in range(0, end, COUNTS):
        inside = first + each < end
        count = tl.load(counts + first + each, mask=inside, other=0) + plus
        totals += tl.where(inside & (count > 0), count, 0)
    return tl.sum(totals, 0)


@triton.jit
def copy_run(target, target_begin, target_size, source, source_begin, source_size, length):
    """Copy ``length`` numbers in a row, but for those outside the target or the source."""
    each = tl.arange(0, RUN)
    for first in range(0, tl.minimum(length, target_size), RUN):
        place = target_begin + first + each
        at = source_begin + first + each
        copied = (first + each < length) & (place >= 0) & (place < target_size)
        copied = copied & (at >= 0) & (at < source_size)
        tl.store(target + place, tl.load(source + at, mask=copied), mask=copied)
