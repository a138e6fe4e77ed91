"""The kernels that join the segments of split keys, and attend over the paths of a tree.

``attention_segments.py`` has what they compute. Each runs behind ``paged_attention_kernel``, which
stores the sums of segments by row, [segments, T, N, E] and [segments, T, N].
"""

import triton
import triton.language as tl

from graphkit.ops.kernels.attention_segments import (
    add_block,
    joined,
    load_metadata,
    load_paths,
    load_queries,
    load_sums,
    no_sums,
    products,
    rescaled,
    scaled,
    segment_at,
    segment_begin,
    sink_sums,
    store_attended,
    whole_sums,
    window_begin,
)
from graphkit.ops.kernels.launch import wait_for_kernel_before


@triton.jit(do_not_specialize=["rows"])
def join_segments_kernel(
    out, segment_acc, segment_top, segment_total, segment_count, sinks, value_scale_M, rows,
    HEADS: tl.constexpr, GROUP: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr, BATCH: tl.constexpr, STARTS_EARLY: tl.constexpr,
):  # fmt: skip
    """One program per BLOCK_M (token, head) rows and BLOCK_E of their elements."""
    wait_for_kernel_before(STARTS_EARLY)
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    dim = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    is_row = row < rows
    count = tl.load(segment_count + row, mask=is_row, other=0)
    acc, top, total = sink_sums(sinks, row % HEADS, is_row, BLOCK_M, BLOCK_E)
    for first in range(0, tl.max(count, 0), BATCH):
        batch = ()  # sums in flight
        for offset in tl.static_range(BATCH):
            segment = first + offset
            own = load_sums(
                segment_acc, segment_top, segment_total, row + segment * rows, segment < count, dim,
                VALUE_DIM,
            )  # fmt: skip
            # Triton has no star in tuples.
            batch = batch + (own,)  # type: ignore[assignment]  # noqa: RUF005
        for offset in tl.static_range(BATCH):
            acc, top, total = joined(acc, top, total, *batch[offset])
    value_scale = None
    if value_scale_M is not None:
        own_scale = value_scale_M + row % HEADS // GROUP
        value_scale = tl.load(own_scale, mask=is_row, other=0.0)[:, None]
    store_attended(out, row, is_row, dim, acc, total, value_scale, VALUE_DIM)


@triton.jit(do_not_specialize=["rows", "splits"])
def join_splits_kernel(
    out, segment_acc, segment_top, segment_total, segment_count, sinks, value_scale_M, rows, splits,
    HEADS: tl.constexpr, GROUP: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_E: tl.constexpr, STARTS_EARLY: tl.constexpr,
):  # fmt: skip
    """As ``join_segments_kernel``, for up to BLOCK_S splits, which it joins at once."""
    wait_for_kernel_before(STARTS_EARLY)
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    dim = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    is_row = row < rows
    split = tl.arange(0, BLOCK_S)
    # Loads do not wait for the count, which is 0 for rows of no request: their sums are undefined.
    count = tl.load(segment_count + row, mask=is_row, other=0)
    place = split[None, :] * rows + row[:, None]
    is_split = split[None, :] < count[:, None]
    may_load = is_row[:, None] & (split < splits)[None, :]
    tops = tl.load(segment_top + place, mask=may_load, other=float("-inf"))
    totals = tl.load(segment_total + place, mask=may_load, other=0.0)
    cells = segment_acc + place[:, :, None] * VALUE_DIM + dim[None, None, :]
    is_cell = may_load[:, :, None] & (dim < VALUE_DIM)[None, None, :]
    sums = tl.load(cells, mask=is_cell, other=0.0)
    tops = tl.where(is_split, tops, float("-inf"))
    acc, top, total = sink_sums(sinks, row % HEADS, is_row, BLOCK_M, BLOCK_E)
    new_top = tl.maximum(top, tl.max(tops, 1))
    weight = rescaled(tops, new_top[:, None])
    total = total * rescaled(top, new_top) + tl.sum(tl.where(is_split, totals, 0.0) * weight, 1)
    acc = tl.sum(tl.where(is_split[:, :, None], sums, 0.0) * weight[:, :, None], 1)
    value_scale = None
    if value_scale_M is not None:
        own_scale = value_scale_M + row % HEADS // GROUP
        value_scale = tl.load(own_scale, mask=is_row, other=0.0)[:, None]
    store_attended(out, row, is_row, dim, acc, total, value_scale, VALUE_DIM)


@triton.jit(do_not_specialize=["tokens", "max_keys", "max_pages", "requests"])
def join_paths_kernel(
    out, segment_acc, segment_top, segment_total, segment_count, query, key_cache, value_cache,
    page_table, cache_seqlens_B, mask, sinks, key_scale_M, value_scale_M,
    query_token_stride, query_head_stride, tokens, max_keys, max_pages, requests, scale_log2,
    cap_log2, KEY_SLOT_STRIDE: tl.constexpr, KEY_HEAD_STRIDE: tl.constexpr,
    VALUE_SLOT_STRIDE: tl.constexpr, VALUE_HEAD_STRIDE: tl.constexpr, PAGE_SIZE: tl.constexpr,
    HEADS: tl.constexpr, GROUP: tl.constexpr, VALUE_DIM: tl.constexpr, REST_DIM: tl.constexpr,
    SHARED: tl.constexpr, MASK_ROWS: tl.constexpr, MASK_COLUMNS: tl.constexpr,
    BLOCK_C: tl.constexpr, WINDOW: tl.constexpr, CHUNKED: tl.constexpr, HAS_CAP: tl.constexpr,
    IS_SPLIT: tl.constexpr, STARTS_EARLY: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_R: tl.constexpr,
    HAS_FLOAT8_CVT: tl.constexpr,
):  # fmt: skip
    """One program per BLOCK_M query heads of a key-value head and a token, a node of a tree.

    The keys of the node's path take the places that they have in a chain: behind those before the
    mask, in the order of its columns. Whole blocks of keys before them are in the stored sums. The
    last of these is of a segment that this program goes on with, unless a segment begins there.

    Parameters are those of ``paged_attention_kernel``.
    """
    wait_for_kernel_before(STARTS_EARLY)
    IS_PAIRED: tl.constexpr = key_cache.dtype.element_ty == tl.int16
    TILES: tl.constexpr = (GROUP + BLOCK_M - 1) // BLOCK_M
    kv_head = tl.program_id(1).to(tl.int64)
    token = (tl.program_id(0) // TILES).to(tl.int64)
    member = tl.program_id(0) % TILES * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row = member < GROUP
    head = kv_head * GROUP + tl.minimum(member, GROUP - 1)
    row = token * HEADS + head
    dim = tl.arange(0, BLOCK_E)
    is_dim = dim < VALUE_DIM

    # The keys of the path: ``first_key`` may be negative.
    request = token // MASK_ROWS
    is_request = request < requests
    length = load_metadata(cache_seqlens_B + request, is_request, False)
    pages = page_table + tl.minimum(request, requests - 1) * max_pages
    first_key = length - MASK_COLUMNS
    before = tl.minimum(tl.maximum(first_key, 0), max_keys)
    node = token + tl.zeros([1], tl.int32)
    path = load_paths(
        mask, node, node < requests * MASK_ROWS, first_key, max_keys, MASK_COLUMNS, BLOCK_C, False
    )
    column = tl.arange(0, BLOCK_C)[None, :]
    # Triton 3.6 cannot scan an axis shorter than the elements of a thread.
    entry = tl.trans(path.to(tl.int32))
    place = tl.sum(tl.where(tl.trans(column) < column, entry, 0), 0)[None, :]
    end = before + tl.sum(tl.sum(path.to(tl.int32), 1), 0)
    begin = end * 0
    if WINDOW:
        begin = tl.maximum(window_begin(end - 1, WINDOW, CHUNKED), 0)
    stored_end = before // BLOCK_N * BLOCK_N
    first = tl.maximum(stored_end, begin // BLOCK_N * BLOCK_N)
    segment = segment_at(first)

    acc, top, total = sink_sums(sinks, head, is_row, BLOCK_M, BLOCK_E)
    count = 2  # the sums of all whole segments, and those of the last
    if IS_SPLIT:
        count = tl.max(tl.load(segment_count + row, mask=is_row, other=0), 0)
    goes_on = (begin < stored_end) & (stored_end != segment_begin(segment))
    stored = row
    UNROLL: tl.constexpr = max(1, 512 // BLOCK_E)  # as registers allow
    for _ in tl.range(0, count - goes_on.to(tl.int32), loop_unroll_factor=UNROLL):
        own = load_sums(segment_acc, segment_top, segment_total, stored, is_row, dim, VALUE_DIM)
        acc, top, total = joined(acc, top, total, *own)
        stored += tokens * HEADS
    own_acc, own_acc_odd, own_top, own_total = no_sums(BLOCK_M, BLOCK_E, 16, IS_PAIRED)
    own, own_top, own_sum = load_sums(
        segment_acc, segment_top, segment_total, stored, is_row & goes_on, dim, VALUE_DIM
    )
    own_total += own_sum[:, None]
    if IS_PAIRED:
        own_acc, own_acc_odd = tl.split(tl.reshape(own, [BLOCK_M, BLOCK_E // 2, 2]))
    else:
        own_acc = own

    queries = query + token * query_token_stride + head[:, None] * query_head_stride
    q, q_odd, lack = load_queries(queries + dim[None, :], is_dim[None, :], IS_PAIRED)
    part, is_part = dim, is_dim  # of a key or value: elements, or pairs of them
    if IS_PAIRED:
        part = tl.arange(0, BLOCK_E // 2)
        is_part = part < VALUE_DIM // 2
    if REST_DIM:
        rest = tl.arange(0, BLOCK_R)
        is_rest = rest < REST_DIM
        q_rest = tl.load(queries + VALUE_DIM + rest[None, :], mask=is_rest[None, :], other=0.0)
    if key_scale_M is not None:
        scale_log2 *= tl.load(key_scale_M + kv_head)
    for start in range(first, end, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        is_key = (key >= begin) & (key < end)
        is_own = path & (place == (key - before)[:, None])
        own_column = tl.sum(tl.where(is_own, column, 0), 1)
        at = tl.where(key < before, key, first_key + own_column)
        page = load_metadata(pages + at // PAGE_SIZE, is_key, False).to(tl.int64)
        slot = page * PAGE_SIZE + at % PAGE_SIZE
        keys = key_cache + kv_head * KEY_HEAD_STRIDE + slot * KEY_SLOT_STRIDE
        values = value_cache + kv_head * VALUE_HEAD_STRIDE + slot * VALUE_SLOT_STRIDE
        is_cell = is_key[:, None] & is_part[None, :]
        v = tl.load(values[:, None] + part[None, :], mask=is_cell, other=0.0)
        if SHARED:
            k = tl.trans(v)
        else:
            is_cell = is_part[:, None] & is_key[None, :]
            k = tl.load(keys[None, :] + part[:, None], mask=is_cell, other=0.0)
        scores = products(q, q_odd, k, IS_PAIRED, HAS_FLOAT8_CVT, PRECISION)
        if REST_DIM:
            is_cell = is_rest[:, None] & is_key[None, :]
            k_rest = tl.load(keys[None, :] + VALUE_DIM + rest[:, None], mask=is_cell, other=0.0)
            scores = tl.dot(q_rest, k_rest.to(q.dtype), scores, input_precision=PRECISION)
        scores = scaled(scores, lack, scale_log2, cap_log2, IS_PAIRED, HAS_CAP)
        scores = tl.where(is_key[None, :], scores, float("-inf"))
        own_acc, own_acc_odd, own_top, own_total = add_block(
            own_acc, own_acc_odd, own_top, own_total, scores, v, q, True, IS_PAIRED,
            HAS_FLOAT8_CVT, PRECISION,
        )  # fmt: skip
        if start + BLOCK_N == segment_begin(segment + 1):
            own, own_sum = whole_sums(own_acc, own_acc_odd, own_total, True, IS_PAIRED)
            acc, top, total = joined(acc, top, total, own, own_top, own_sum)
            own_acc, own_acc_odd, own_top, own_total = no_sums(BLOCK_M, BLOCK_E, 16, IS_PAIRED)
            segment += 1
    own, own_sum = whole_sums(own_acc, own_acc_odd, own_total, True, IS_PAIRED)
    acc, top, total = joined(acc, top, total, own, own_top, own_sum)
    value_scale = None
    if value_scale_M is not None:
        value_scale = tl.load(value_scale_M + kv_head)
    store_attended(out, row, is_row, dim, acc, total, value_scale, VALUE_DIM)
