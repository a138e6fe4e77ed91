"""Device functions of the kernels over packed rows; see ``graphkit.ops.packed``."""

import triton
import triton.language as tl

COUNTS = tl.constexpr(256)
RUN = tl.constexpr(128)


@triton.jit
def total_before(counts, end, plus: tl.constexpr):
    """Return the sum of the first ``end`` counts plus ``plus`` each; a negative one counts as 0."""
    each = tl.arange(0, COUNTS)
    totals = tl.zeros([COUNTS], tl.int64)
    for first in range(0, end, COUNTS):
        inside = first + each < end
        count = tl.load(counts + first + each, mask=inside, other=0) + plus
        totals += tl.where(inside & (count > 0), count, 0)
    return tl.sum(totals, 0)


@triton.jit
def copy_run(target, target_begin, target_size, source, source_begin, source_size, length):
    """Copy ``length`` consecutive numbers, except those outside the target or the source."""
    each = tl.arange(0, RUN)
    for first in range(0, tl.minimum(length, target_size), RUN):
        to = target_begin + first + each
        at = source_begin + first + each
        copied = (first + each < length) & (to >= 0) & (to < target_size)
        copied = copied & (at >= 0) & (at < source_size)
        tl.store(target + to, tl.load(source + at, mask=copied), mask=copied)
