"""Segments of keys, their softmax and how they are joined: what the kernels of attention share.

The bits of a row do not depend on the launch. Keys are divided into segments by their position in
the request (``segment_at``), and segments into blocks. The softmax of a segment is computed block
by block (``add_block``), and segments are joined in order (``joined``). Weights are added up by a
product with ones, since the order of a sum over the lanes of a tile depends on the tile. A compiler
that fuses multiplications and additions as it likes would do so in some variants of a kernel only:
kernels are launched with ``enable_fp_fusion=False``.

The sums of a segment are ``acc``, of values by weights relative to ``top``, and ``total``, of the
weights.
"""

import triton
import triton.language as tl

from graphkit.ops.kernels.float8 import float8_pairs
from graphkit.ops.kernels.launch import KEPT_IN_L2

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_metadata(entry, mask, FOLLOWS_STORE: tl.constexpr):
    """Load entries of a table, of lengths or of a mask; 0 outside of ``mask``.

    Before a program waits, the L1 cache may have older ones.
    """
    if FOLLOWS_STORE:
        loaded = tl.load(entry, mask=mask, other=0, cache_modifier=".cg")
    else:
        loaded = tl.load(entry, mask=mask, other=0, eviction_policy=KEPT_IN_L2)
    return loaded


@triton.jit
def load_paths(
    mask, row, is_row, first_key, max_keys,
    COLUMNS: tl.constexpr, BLOCK_C: tl.constexpr, FOLLOWS_STORE: tl.constexpr,
):  # fmt: skip
    """Return which columns some rows of a mask see, [rows, BLOCK_C].

    Columns stand for the keys from ``first_key`` on. Those before the first key of the request, and
    those behind ``max_keys``, are not seen.
    """
    column = tl.arange(0, BLOCK_C)
    key = first_key + column
    is_key = (column < COLUMNS) & (key >= 0) & (key < max_keys)
    entry = mask + row.to(tl.int64)[:, None] * COLUMNS + column[None, :]
    return load_metadata(entry, is_row[:, None] & is_key[None, :], FOLLOWS_STORE) != 0


@triton.jit
def window_begin(position, WINDOW: tl.constexpr, CHUNKED: tl.constexpr):
    """Return the first position that rows at some positions see."""
    begin = position - WINDOW + 1
    if CHUNKED:
        begin = tl.maximum(position, 0) // WINDOW * WINDOW
    return begin


@triton.jit
def segment_at(position):
    """Return the number of the segment of a position, which is less than 2**24.

    Segments have 256 keys before position 4096. From there on, each power of two begins eight
    segments of twice the length of those before.
    """
    exponent = (position.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
    level = tl.maximum(exponent - 11, 0)
    return 8 * level + (position >> (8 + level))


@triton.jit
def segment_begin(segment):
    """Return the first position of a segment."""
    level = tl.maximum(segment // 8 - 1, 0)
    return (segment - 8 * level) << (8 + level)


@triton.jit
def _scaled_to_float16(q):
    """Return rows in float16 and the factors that they lack, powers of two.

    The largest element of a row is then between 2**15 and 2**16, so that those down to 2**-29 of it
    keep the 8 bits of bfloat16.
    """
    q = q.to(tl.float32)
    exponent = tl.max(tl.abs(q), 1).to(tl.int32, bitcast=True) >> 23
    exponent = tl.maximum(exponent, 16)  # that of the factors is in range
    raised = ((269 - exponent) << 23).to(tl.float32, bitcast=True)
    lack = ((exponent - 15) << 23).to(tl.float32, bitcast=True)
    return (q * raised[:, None]).to(tl.float16), lack


@triton.jit
def load_queries(elements, is_inside, IS_PAIRED: tl.constexpr):
    """Load query rows. Return their even elements, their odd ones, and the factor each row lacks.

    Unless IS_PAIRED, the first result has all elements, the second is not used, and factors are 1.
    """
    q = tl.load(elements, mask=is_inside, other=0.0)
    q_odd, lack = q, tl.full([q.shape[0]], 1.0, tl.float32)
    if IS_PAIRED:
        if q.dtype == tl.bfloat16:
            q, lack = _scaled_to_float16(q)
        q, q_odd = tl.split(tl.reshape(q, [q.shape[0], q.shape[1] // 2, 2]))
    return q, q_odd, lack


@triton.jit
def products(
    q, q_odd, k, IS_PAIRED: tl.constexpr, HAS_FLOAT8_CVT: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """Return the products of query rows and keys, [rows, keys]. ``k`` is [elements, keys]."""
    if IS_PAIRED:
        k, k_odd = float8_pairs(k, HAS_FLOAT8_CVT)
        scores = tl.dot(q, k)
        scores = tl.dot(q_odd, k_odd, scores)
    else:
        scores = tl.dot(q, k.to(q.dtype), input_precision=PRECISION)
    return scores


@triton.jit
def scaled(
    scores, lack, scale_log2, cap_log2, IS_PAIRED: tl.constexpr, HAS_CAP: tl.constexpr
):  # fmt: skip
    """Return scores for powers of two, from the products of queries and keys."""
    if IS_PAIRED:
        scores *= (scale_log2 * lack)[:, None]
    else:
        scores *= scale_log2
    if HAS_CAP:  # cap * tanh(score / cap)
        scores = (2.0 * tl.sigmoid(2.0 * scores) - 1.0) * cap_log2
    return scores


@triton.jit
def no_sums(
    BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr, COLUMNS: tl.constexpr, IS_PAIRED: tl.constexpr
):  # fmt: skip
    """Return ``acc``, ``acc_odd``, ``top`` and ``total`` of no keys.

    ``total`` has COLUMNS; see ``add_block``. If IS_PAIRED, ``acc`` has the even elements of the
    values and ``acc_odd`` the odd ones; otherwise ``acc_odd`` is not used.
    """
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M, COLUMNS], tl.float32)
    if IS_PAIRED:
        acc = tl.zeros([BLOCK_M, BLOCK_E // 2], tl.float32)
        acc_odd = tl.zeros([BLOCK_M, BLOCK_E // 2], tl.float32)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
        acc_odd = tl.zeros([1], tl.float32)
    return acc, acc_odd, top, total


@triton.jit
def add_block(
    acc, acc_odd, top, total, scores, v, q, IS_SEGMENTED: tl.constexpr,
    IS_PAIRED: tl.constexpr, HAS_FLOAT8_CVT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the sums of ``no_sums`` with those of a block of keys. ``v`` is [keys, elements].

    Weights have the dtype of the query rows ``q``. If IS_SEGMENTED, ``total`` has 16 equal columns,
    products of the weights and ones, whose order the layout does not decide. Otherwise it has a
    column per key of a block, which ``whole_sums`` adds: a sum over keys waits for other warps. Or
    it has one column, where registers are few.
    """
    new_top = tl.maximum(top, tl.max(scores, 1))
    # The base of a row that has seen no key yet: without it, it would compute inf - inf.
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores - base[:, None])
    shrink = rescaled(top, new_top)[:, None]
    if IS_SEGMENTED:
        ones = tl.full([scores.shape[1], 16], 1.0, tl.float32).to(q.dtype)
        total = tl.dot(weights.to(q.dtype), ones, total * shrink, input_precision=PRECISION)
    elif total.shape[1] == 1:
        total = total * shrink + tl.sum(weights, 1)[:, None]
    else:
        total = total * shrink + weights
    weights = weights.to(q.dtype)
    acc = acc * shrink
    if IS_PAIRED:
        v, v_odd = float8_pairs(v, HAS_FLOAT8_CVT)
        acc_odd = tl.dot(weights, v_odd, acc_odd * shrink)
    acc = tl.dot(weights, v.to(q.dtype), acc, input_precision=PRECISION)
    return acc, acc_odd, new_top, total


@triton.jit
def whole_sums(acc, acc_odd, total, IS_SEGMENTED: tl.constexpr, IS_PAIRED: tl.constexpr):
    """Return all elements of ``acc``, and ``total`` as one column, from those of ``add_block``."""
    if IS_PAIRED:
        acc = tl.interleave(acc, acc_odd)
    if IS_SEGMENTED:
        total = tl.where(tl.arange(0, 16)[None, :] == 0, total, 0.0)
    return acc, tl.sum(total, 1)


@triton.jit
def rescaled(top, new_top):
    """Return the factor of sums whose scores were relative to a lower maximum."""
    # Without this, a row that has seen no key yet would compute inf - inf.
    return tl.exp2(top - tl.where(new_top == float("-inf"), 0.0, new_top))


@triton.jit
def joined(acc, top, total, own_acc, own_top, own_total):
    """Return the sums of two groups of keys. A group without keys leaves the others as they are."""
    new_top = tl.maximum(top, own_top)
    factor, own_factor = rescaled(top, new_top), rescaled(own_top, new_top)
    acc = tl.fma(acc, factor[:, None], own_acc * own_factor[:, None])
    return acc, new_top, tl.fma(total, factor, own_total * own_factor)


@triton.jit
def load_sums(acc, top, total, place, is_row, dim, VALUE_DIM: tl.constexpr):
    """Load the sums of rows at places of ``acc``, ``top`` and ``total`` in memory."""
    cells = acc + place[:, None] * VALUE_DIM + dim[None, :]
    is_cell = is_row[:, None] & (dim < VALUE_DIM)[None, :]
    return (
        tl.load(cells, mask=is_cell, other=0.0),
        tl.load(top + place, mask=is_row, other=float("-inf")),
        tl.load(total + place, mask=is_row, other=0.0),
    )


@triton.jit
def store_sums(
    acc, top, total, place, is_row, dim, own_acc, own_top, own_total, VALUE_DIM: tl.constexpr
):
    """Store sums where ``load_sums`` loads them."""
    # The compiler sees that rows are aligned, and stores 16 bytes at a time.
    cells = acc + place[:, None] * VALUE_DIM + dim[None, :]
    tl.store(cells, own_acc, mask=is_row[:, None] & (dim < VALUE_DIM)[None, :])
    tl.store(top + place, own_top, mask=is_row)
    tl.store(total + place, own_total, mask=is_row)


@triton.jit
def sink_sums(sinks, head, is_row, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr):
    """Return the sums that segments are joined to: those of the heads' sinks, if there are any."""
    acc = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if sinks is not None:
        top = tl.load(sinks + head, mask=is_row, other=0.0).to(tl.float32) * LOG2_E
        total += 1.0
    return acc, top, total


@triton.jit
def store_attended(
    out, place, is_row, dim, acc, total, value_scale, VALUE_DIM: tl.constexpr
):  # fmt: skip
    """Store the mean of values, from their sum and the sum of their weights.

    ``value_scale`` is the factor of the values of each row, or None.
    """
    # The sum of a row without keys is 0 times values that other rows see, which may be NaN.
    divisor = tl.where(total == 0.0, -1.0, total)
    result = tl.where(divisor[:, None] < 0.0, 0.0, acc * (1.0 / divisor)[:, None])
    if value_scale is not None:
        result *= value_scale
    cells = out + place[:, None] * VALUE_DIM + dim[None, :]
    is_cell = is_row[:, None] & (dim < VALUE_DIM)[None, :]
    tl.store(cells, result.to(out.dtype.element_ty), mask=is_cell)
