"""Rotation of the rows of a request within the kernel of paged attention.

A program rotates its query rows, and the keys of all rows of its request for its key-value head,
which it stores with their values. Programs of the same request and head store the same bits.
"""

import triton
import triton.language as tl

from graphkit.ops.kernels.decoder import sum_of_parts
from graphkit.ops.kernels.heads import rotated_pair


@triton.jit
def cosine_and_sine(
    positions, inverse_frequencies, begin, rows, HALF: tl.constexpr, BLOCK_W: tl.constexpr
):
    """Return the cosine and sine of the angles of a request's rows, [BLOCK_W, HALF] in float32."""
    own = tl.arange(0, BLOCK_W)
    frequency = tl.load(inverse_frequencies + tl.arange(0, HALF))
    position = tl.load(positions + begin + own, mask=own < rows, other=0).to(tl.float32)
    angle = position[:, None] * frequency[None, :]
    return tl.cos(angle), tl.sin(angle)


@triton.jit
def rotated_queries(
    qkv, size, cos, sin, begin, first, rows, kv_head,
    QUERY_HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr,
    BLOCK_M: tl.constexpr, PARTS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Return the rotated rows of a tile, [BLOCK_M, 2 * HALF], from query ``first`` of a request."""
    own_query = first + tl.arange(0, BLOCK_M // GROUP)
    is_own, token = own_query < rows, (begin + own_query).to(tl.int64)
    # Rows behind the last of the request take any angle.
    place = tl.minimum(own_query, cos.shape[0] - 1)[:, None] + tl.zeros([1, HALF], tl.int32)
    cos, sin = tl.gather(cos, place, 0), tl.gather(sin, place, 0)
    head = kv_head * GROUP + tl.arange(0, GROUP)
    row = token[:, None] * (QUERY_HEADS + 2 * KEY_HEADS) + head[None, :]
    pointer = qkv + row[:, :, None] * (2 * HALF) + tl.arange(0, HALF)[None, None, :]
    is_cell = is_own[:, None, None]
    one = sum_of_parts(pointer, size, is_cell, PARTS, DTYPE)
    two = sum_of_parts(pointer + HALF, size, is_cell, PARTS, DTYPE)
    one, two = rotated_pair(one, two, cos[:, None, :], sin[:, None, :])
    both = tl.permute(tl.join(one, two), (0, 1, 3, 2))
    return tl.reshape(both, [BLOCK_M, 2 * HALF])


@triton.jit
def store_rotated_rows(
    key_cache, value_cache, loc_T, slots, qkv, size, cos, sin, begin, rows, kv_head,
    QUERY_HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, HALF: tl.constexpr,
    KEY_SLOT_STRIDE: tl.constexpr, KEY_HEAD_STRIDE: tl.constexpr,
    VALUE_SLOT_STRIDE: tl.constexpr, VALUE_HEAD_STRIDE: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """Store the keys and values of all rows of a request for a key-value head."""
    DTYPE: tl.constexpr = key_cache.dtype.element_ty
    own = tl.arange(0, cos.shape[0])
    is_own, token = own < rows, (begin + own).to(tl.int64)
    slot = tl.load(loc_T + token, mask=is_own, other=-1)
    is_cell = (is_own & (slot >= 0) & (slot < slots))[:, None]
    lane = tl.arange(0, HALF)[None, :]
    row = token[:, None] * (QUERY_HEADS + 2 * KEY_HEADS) + QUERY_HEADS + kv_head
    pointer = qkv + row * (2 * HALF) + lane
    one = sum_of_parts(pointer, size, is_own[:, None], PARTS, DTYPE)
    two = sum_of_parts(pointer + HALF, size, is_own[:, None], PARTS, DTYPE)
    one, two = rotated_pair(one, two, cos, sin)
    keys = key_cache + slot[:, None] * KEY_SLOT_STRIDE + kv_head * KEY_HEAD_STRIDE + lane
    tl.store(keys, one, mask=is_cell)
    tl.store(keys + HALF, two, mask=is_cell)
    pointer += KEY_HEADS * 2 * HALF
    one = sum_of_parts(pointer, size, is_own[:, None], PARTS, DTYPE)
    two = sum_of_parts(pointer + HALF, size, is_own[:, None], PARTS, DTYPE)
    values = value_cache + slot[:, None] * VALUE_SLOT_STRIDE + kv_head * VALUE_HEAD_STRIDE + lane
    tl.store(values, one, mask=is_cell)
    tl.store(values + HALF, two, mask=is_cell)
