"""The kernel of paged attention.

One program handles a tile of one request's query rows for one key-value head, and one split of that
request's keys. A tile holds the W rows of all query heads that share the key-value head, if they
fit. With more than one split each program stores its normalised partial result and the log of its
weight, and a second kernel joins them. The unused lanes of requests with fewer than W rows write
zeros into the rows that no request has, so that no further launch has to clear them. With a mask
every request has W rows, and cu_seqlens_q is not read.

A key has the value's E elements and REST_DIM more, which are multiplied apart, since blocks are
powers of two: 512 + 64 for latent attention. There the value is the first part of the key (SHARED)
and is loaded once.
"""

import triton
import triton.language as tl

from graphkit.ops.kernels.key_slots import slots_of_keys

LOG2_E = tl.constexpr(1.4426950408889634)


# Prompts have any width: specialisation would compile this kernel for each. Trees have few.
@triton.jit(
    do_not_specialize=[
        "out_split_stride", "tokens", "heads", "max_keys", "max_pages", "requests",
        "row_tiles", "width", "splits",
    ]
)  # fmt: skip
def paged_attention_kernel(
    out, lse, query, key_cache, value_cache, page_table, cache_seqlens_B, cu_seqlens_q_B1, mask,
    sinks, out_split_stride, out_token_stride, out_head_stride, query_token_stride,
    query_head_stride, key_slot_stride, key_head_stride, value_slot_stride, value_head_stride,
    tokens, heads, max_keys, max_pages, requests, row_tiles, width, splits,
    scale_log2, cap_log2,
    PAGE_SIZE: tl.constexpr, GROUP: tl.constexpr, VALUE_DIM: tl.constexpr, REST_DIM: tl.constexpr,
    SHARED: tl.constexpr, MASK_ROWS: tl.constexpr, MASK_COLUMNS: tl.constexpr,
    BLOCK_C: tl.constexpr, WINDOW: tl.constexpr, HAS_CAP: tl.constexpr,
    IS_SPLIT: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """One program per (request, row tile), key-value head and split."""
    split = tl.program_id(1).to(tl.int64)
    kv_head = (tl.program_id(0) % (heads // GROUP)).to(tl.int64)
    tile = tl.program_id(0) // (heads // GROUP)
    request = (tile // row_tiles).to(tl.int64)

    first_row = tile % row_tiles * BLOCK_M
    row = first_row + tl.arange(0, BLOCK_M)
    own_query = row // GROUP
    # There are more programs than requests if there are more rows than the requests can have.
    length = tl.load(cache_seqlens_B + tl.minimum(request, requests - 1))
    length = tl.where(request < requests, length, 0)
    if MASK_COLUMNS:
        width = MASK_ROWS
        begin, end = request * width, tokens
    else:
        begin = tl.maximum(tl.load(cu_seqlens_q_B1 + tl.minimum(request, requests)), 0)
        end = tl.minimum(tl.load(cu_seqlens_q_B1 + tl.minimum(request + 1, requests)), tokens)
    rows = tl.minimum(end - begin, width)
    prefix = length - MASK_COLUMNS if MASK_COLUMNS else length - rows
    is_row = own_query < rows
    token = begin + own_query
    head = kv_head * GROUP + row % GROUP
    dim = tl.arange(0, BLOCK_E)
    is_dim = dim < VALUE_DIM
    queries = query + token[:, None] * query_token_stride + head[:, None] * query_head_stride
    q = tl.load(queries + dim[None, :], mask=is_row[:, None] & is_dim[None, :], other=0.0)
    if REST_DIM:
        rest = tl.arange(0, BLOCK_R)
        is_rest = rest < REST_DIM
        rests = queries + VALUE_DIM + rest[None, :]
        q_rest = tl.load(rests, mask=is_row[:, None] & is_rest[None, :], other=0.0)

    # The keys that some row of this tile may see.
    keys_begin, keys_end = 0, tl.minimum(length, max_keys)
    if MASK_COLUMNS:
        mask_row = mask + (request * width + own_query[:, None]) * MASK_COLUMNS
    else:
        last_query = tl.minimum((first_row + BLOCK_M - 1) // GROUP, rows - 1)
        keys_end = tl.minimum(keys_end, prefix + last_query + 1)
    if WINDOW:
        if MASK_COLUMNS:
            column = tl.arange(0, BLOCK_C)
            is_entry = (own_query < width)[:, None] & (column < MASK_COLUMNS)[None, :]
            path = tl.load(mask_row + column[None, :], mask=is_entry, other=0) != 0
            own_keys = tl.where(own_query < width, tl.sum(path.to(tl.int32), 1), MASK_COLUMNS)
            window_begin = prefix - WINDOW + own_keys
            keys_begin = tl.maximum(prefix - WINDOW, 0)
        else:
            window_begin = prefix - WINDOW + own_query + 1
            keys_begin = tl.maximum(prefix - WINDOW + first_row // GROUP + 1, 0)
    keys_end = tl.maximum(keys_end, keys_begin)
    span = tl.cdiv(tl.cdiv(keys_end - keys_begin, splits), 16) * 16
    first = tl.minimum(keys_begin + split * span, keys_end).to(tl.int32)
    last = tl.minimum(first + span, keys_end).to(tl.int32)
    # Whole blocks of the prefix need no mask; the rest of the split does.
    middle = first + tl.maximum(tl.minimum(last, prefix) - first, 0) // BLOCK_N * BLOCK_N
    middle = first if WINDOW else middle
    pages = page_table + request * max_pages

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if sinks is not None:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2_E
        top = tl.where(split == 0, sink, top)
        total = tl.where(split == 0, 1.0, total)
    acc = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    for masked in tl.static_range(1 if WINDOW else 0, 2):
        begin_key = middle if masked else first
        end_key = last if masked else middle
        key = begin_key + tl.arange(0, BLOCK_N)
        page = tl.load(pages + key // PAGE_SIZE, mask=key < end_key, other=0)
        for start in range(begin_key, end_key, BLOCK_N):
            key = start + tl.arange(0, BLOCK_N)
            is_key = key < last
            slot = slots_of_keys(page, key, PAGE_SIZE)
            # The next block's pages: keys that depend on a load of their own block wait for it.
            following = key + BLOCK_N
            page = tl.load(pages + following // PAGE_SIZE, mask=following < end_key, other=0)

            seen = is_key
            if masked:
                own_key = key - prefix
                if MASK_COLUMNS:
                    is_column = (own_key >= 0) & is_key
                    is_cell = (own_query < width)[:, None] & is_column[None, :]
                    tree = tl.load(mask_row + own_key[None, :], mask=is_cell, other=0) != 0
                    visible = (tree | (own_key < 0)[None, :]) & is_key[None, :]
                else:
                    visible = (own_key[None, :] <= own_query[:, None]) & is_key[None, :]
                if WINDOW:
                    visible = visible & (key[None, :] >= window_begin[:, None])
                if MASK_COLUMNS or WINDOW:
                    seen = tl.max(visible.to(tl.int32), 0) != 0

            # Weight 0 times NaN is NaN, so a value that no query sees is not loaded.
            keys = key_cache + kv_head * key_head_stride + slot * key_slot_stride
            if SHARED:
                v = tl.load(
                    keys[:, None] + dim[None, :], mask=seen[:, None] & is_dim[None, :], other=0.0
                )
                scores = tl.dot(q, tl.trans(v.to(q.dtype)), input_precision=PRECISION)
            else:
                is_cell = is_dim[:, None] & is_key[None, :]
                k = tl.load(keys[None, :] + dim[:, None], mask=is_cell, other=0.0)
                scores = tl.dot(q, k.to(q.dtype), input_precision=PRECISION)
            if REST_DIM:
                is_cell = is_rest[:, None] & is_key[None, :]
                k_rest = tl.load(keys[None, :] + VALUE_DIM + rest[:, None], mask=is_cell, other=0.0)
                scores = tl.dot(q_rest, k_rest.to(q.dtype), scores, input_precision=PRECISION)
            scores = scores * scale_log2
            if HAS_CAP:  # cap * tanh(score / cap)
                scores = (2.0 * tl.sigmoid(2.0 * scores) - 1.0) * cap_log2
            if masked:
                scores = tl.where(visible, scores, float("-inf"))

            new_top = tl.maximum(top, tl.max(scores, 1))
            # Without this, a row that has seen no key yet would compute inf - inf.
            base = tl.where(new_top == float("-inf"), 0.0, new_top)
            weights = tl.exp2(scores - base[:, None])
            shrink = tl.exp2(top - base)
            total = total * shrink + tl.sum(weights, 1)
            if not SHARED:
                values = value_cache + kv_head * value_head_stride + slot * value_slot_stride
                is_cell = seen[:, None] & is_dim[None, :]
                v = tl.load(values[:, None] + dim[None, :], mask=is_cell, other=0.0)
            acc = acc * shrink[:, None]
            acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc, input_precision=PRECISION)
            top = new_top

    # The sum of a row without keys is 0 times values that other rows see, which may be NaN.
    divisor = tl.where(total == 0.0, -1.0, total)
    result = tl.where(divisor[:, None] < 0.0, 0.0, acc / divisor[:, None])
    outs = out + split * out_split_stride
    cells = outs + (token[:, None] * out_token_stride + head[:, None] * out_head_stride)
    is_cell = is_row[:, None] & is_dim[None, :]
    tl.store(cells + dim[None, :], result.to(out.dtype.element_ty), mask=is_cell)
    if IS_SPLIT:
        weight_log2 = top + tl.log2(tl.where(total == 0.0, 1.0, total))
        tl.store(lse + (split * tokens + token) * heads + head, weight_log2, mask=is_row)

    if rows < width:
        # The requests before this one have request * width - begin unused lanes.
        spare = tl.load(cu_seqlens_q_B1 + requests) + request * width - begin + own_query - rows
        is_spare = (own_query >= rows) & (own_query < width) & (spare >= 0) & (spare < tokens)
        cells = outs + (spare[:, None] * out_token_stride + head[:, None] * out_head_stride)
        is_cell = is_spare[:, None] & is_dim[None, :]
        tl.store(cells + dim[None, :], 0.0, mask=is_cell)
        if IS_SPLIT:
            lses = lse + (split * tokens + spare) * heads + head
            tl.store(lses, float("-inf"), mask=is_spare)
