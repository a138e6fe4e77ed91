"""The kernel of paged attention.

One program handles a tile of one request's query rows for one key-value head, and one split of that
request's keys. A tile holds the W rows of all query heads that share the key-value head, if they
fit. The unused lanes of requests with fewer than W rows write zeros into the rows that no request
has, so that no further launch has to clear them. With a mask every request has W rows, and
cu_seqlens_q is not read.

If IS_SEGMENTED, a row has the same bits in every call: ``attention_segments.py`` has the order of
sums. Segments are joined in registers if a program has all keys of its rows. If keys are split,
programs store each of their segments, and ``attention_joins.py`` joins them. The keys that a node
of a tree sees lie apart from each other: this kernel has whole blocks of the keys before the mask,
and stores their sums.

Otherwise a split is one segment. Split s of S has the blocks of keys s, s + S, s + 2 S and so on.
Its first blocks do not depend on the request's length: the program loads their pages and the length
together.

If FOLLOWS_STORE, the kernel before stores the rows of this call, and all else is older. A program
then reads its page table while that kernel runs. If HAS_EARLY_KEYS, it also requests its first
block of keys before it waits, and loads its query rows in each step of its loop, after keys and
values. With more than two blocks, the values of the first are requested when its keys have arrived:
more requests at once would delay the loads of the kernel before.

A key has the value's E elements and REST_DIM more, which are multiplied apart, since blocks are
powers of two: 512 + 64 for latent attention. There the value is the first part of the key (SHARED)
and is loaded once.

Caches of float8_e4m3fn are read as words of two elements, and queries of 16 bits are multiplied
with both: even elements with the lower bytes, odd ones with the upper. Products are of float16.
"""

import triton
import triton.language as tl

from graphkit.ops.kernels.attention_segments import (
    add_block,
    joined,
    load_metadata,
    load_paths,
    load_queries,
    no_sums,
    products,
    scaled,
    segment_at,
    segment_begin,
    sink_sums,
    store_attended,
    store_sums,
    whole_sums,
    window_begin,
)
from graphkit.ops.kernels.launch import offset_after_wait


@triton.jit
def _both(a, b):
    return a & b


@triton.jit
def _load_pages(pages, run, end, PAGE_SIZE: tl.constexpr, FOLLOWS_STORE: tl.constexpr):
    """Return the page of each run of keys, int64; 0 for runs from ``end`` on."""
    return load_metadata(pages + run // PAGE_SIZE, run < end, FOLLOWS_STORE).to(tl.int64)


@triton.jit
def _offset_after_copies(has_copies):
    """Wait for the copies of this thread if ``has_copies``, and return 0.

    The compiler takes this function for a pure expression, see ``offset_after_wait``.
    """
    offset = tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $1, 0; @p cp.async.wait_all; mov.b32 $0, 0; }",
        "=r,r", [has_copies.to(tl.int32)], dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip
    return offset * 16


# Prompts have any width: specialisation would compile this kernel for each. Trees have few. What a
# model fixes, heads and strides of its cache, is constant: short code starts and runs sooner.
@triton.jit(
    do_not_specialize=["tokens", "max_keys", "max_pages", "requests", "width", "splits"],
    do_not_specialize_on_alignment=["row_tiles"],
)
def paged_attention_kernel(
    out, segment_acc, segment_top, segment_total, segment_count, query, key_cache, value_cache,
    page_table, cache_seqlens_B, cu_seqlens_q_B1, mask, sinks, key_scale_M, value_scale_M,
    query_token_stride, query_head_stride, tokens, max_keys, max_pages, requests, row_tiles, width,
    splits, scale_log2, cap_log2, KEY_SLOT_STRIDE: tl.constexpr,
    KEY_HEAD_STRIDE: tl.constexpr, VALUE_SLOT_STRIDE: tl.constexpr,
    VALUE_HEAD_STRIDE: tl.constexpr, PAGE_SIZE: tl.constexpr, HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    VALUE_DIM: tl.constexpr, REST_DIM: tl.constexpr, SHARED: tl.constexpr,
    MASK_ROWS: tl.constexpr, MASK_COLUMNS: tl.constexpr, BLOCK_C: tl.constexpr,
    WINDOW: tl.constexpr, CHUNKED: tl.constexpr, HAS_CAP: tl.constexpr,
    IS_SEGMENTED: tl.constexpr, IS_SPLIT: tl.constexpr, STARTS_EARLY: tl.constexpr,
    FOLLOWS_STORE: tl.constexpr, HAS_EARLY_KEYS: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, RUN: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_R: tl.constexpr, HAS_FLOAT8_CVT: tl.constexpr,
):  # fmt: skip
    """One program per (request, row tile), key-value head and split."""
    if STARTS_EARLY and not FOLLOWS_STORE:
        tl.extra.cuda.gdc_wait()
    IS_PAIRED: tl.constexpr = key_cache.dtype.element_ty == tl.int16
    IS_MASKED: tl.constexpr = MASK_COLUMNS > 0 and not IS_SEGMENTED
    # A row of the mask is a word of what it hides, so that no block of keys waits for the mask.
    BITS: tl.constexpr = 64 if MASK_COLUMNS > 32 else 32
    WORD: tl.constexpr = tl.int64 if MASK_COLUMNS > 32 else tl.int32
    IS_WORD: tl.constexpr = MASK_COLUMNS <= 64
    COLUMNS: tl.constexpr = 16 if IS_SEGMENTED else 1 if SHARED else BLOCK_N
    IS_FIRST_KNOWN: tl.constexpr = not (IS_SEGMENTED or WINDOW)
    split = tl.program_id(1)
    kv_head = (tl.program_id(0) % (HEADS // GROUP)).to(tl.int64)
    tile = tl.program_id(0) // (HEADS // GROUP)
    request = tile // row_tiles
    # There are more programs than requests if there are more rows than the requests can have.
    pages = page_table + tl.minimum(request, requests - 1).to(tl.int64) * max_pages
    # Runs of RUN keys lie in one page each. The page number of a run is loaded once and spread over
    # its keys. In large blocks a load per key is faster: RUN is 1.
    runs = tl.arange(0, BLOCK_N // RUN) * RUN
    first, step = split * BLOCK_N, splits * BLOCK_N
    if IS_SEGMENTED:
        step = BLOCK_N
    if IS_FIRST_KNOWN:
        two_pages = _load_pages(pages, first + runs, max_keys, PAGE_SIZE, FOLLOWS_STORE)
        next_page = _load_pages(pages, first + runs + step, max_keys, PAGE_SIZE, FOLLOWS_STORE)
        two_pages |= next_page << 32
        third_page = _load_pages(pages, first + runs + 2 * step, max_keys, PAGE_SIZE, FOLLOWS_STORE)

    first_row = tile % row_tiles * BLOCK_M
    row = first_row + tl.arange(0, BLOCK_M)
    own_query = row // GROUP
    own_length = cache_seqlens_B + tl.minimum(request, requests - 1)
    length = load_metadata(own_length, request < requests, FOLLOWS_STORE)
    if MASK_COLUMNS:
        width = MASK_ROWS
        begin, end = request * width, tokens
    else:
        first_of_own = cu_seqlens_q_B1 + tl.minimum(request, requests)
        first_of_next = cu_seqlens_q_B1 + tl.minimum(request + 1, requests)
        begin = tl.maximum(load_metadata(first_of_own, True, FOLLOWS_STORE), 0)
        end = tl.minimum(load_metadata(first_of_next, True, FOLLOWS_STORE), tokens)
    rows = tl.minimum(end - begin, width)
    prefix = length - MASK_COLUMNS if MASK_COLUMNS else length - rows
    is_row = own_query < rows
    token = (begin + own_query).to(tl.int64)
    head = kv_head * GROUP + row % GROUP
    dim = tl.arange(0, BLOCK_E)
    is_dim = dim < VALUE_DIM
    own_row = tl.minimum(token, tokens - 1)  # unused lanes take any row
    queries = query + own_row[:, None] * query_token_stride + head[:, None] * query_head_stride
    part, is_part = dim, is_dim  # of a key or value: elements, or pairs of them
    if IS_PAIRED:
        part = tl.arange(0, BLOCK_E // 2)
        is_part = part < VALUE_DIM // 2
    if not HAS_EARLY_KEYS:
        if STARTS_EARLY:
            tl.extra.cuda.gdc_wait()
        q, q_odd, lack = load_queries(queries + dim[None, :], is_dim[None, :], IS_PAIRED)
    if REST_DIM:
        rest = tl.arange(0, BLOCK_R)
        is_rest = rest < REST_DIM
        q_rest = tl.load(queries + VALUE_DIM + rest[None, :], mask=is_rest[None, :], other=0.0)

    # The keys that some row of this tile may see.
    keys_begin, keys_end = 0, tl.minimum(length, max_keys)
    position = prefix + own_query
    if MASK_COLUMNS:
        before = tl.minimum(tl.maximum(prefix, 0), max_keys)
        if WINDOW or IS_MASKED:
            path = load_paths(
                mask, token, is_row & (request < requests), prefix, max_keys, MASK_COLUMNS, BLOCK_C,
                FOLLOWS_STORE,
            )  # fmt: skip
            position = before + tl.sum(path.to(tl.int32), 1) - 1
        if IS_SEGMENTED:
            keys_end = before // BLOCK_N * BLOCK_N
    else:
        last_query = tl.minimum((first_row + BLOCK_M - 1) // GROUP, rows - 1)
        keys_end = tl.minimum(keys_end, prefix + last_query + 1)
    if WINDOW:
        own_begin = window_begin(position, WINDOW, CHUNKED)
        if IS_MASKED and (CHUNKED or WINDOW < MASK_COLUMNS):  # it may begin within the path
            path &= before + tl.cumsum(path.to(tl.int32), 1) > own_begin[:, None]
            first_column = tl.where(path, tl.arange(0, BLOCK_C)[None, :], MASK_COLUMNS)
            first_key = prefix + tl.min(first_column, 1)
            own_begin = tl.where(own_begin > prefix, first_key, own_begin)
        keys_begin = tl.maximum(tl.min(tl.where(is_row, own_begin, keys_end), 0), 0)
    keys_end = tl.maximum(keys_end, keys_begin)
    if IS_MASKED and IS_WORD:
        column = tl.arange(0, BLOCK_C)[None, :]
        bit = tl.full([1, 1], 1, WORD) << column.to(WORD)
        hidden = tl.sum(tl.where(path | (column >= MASK_COLUMNS), 0, bit), 1)
        all_hidden = tl.reduce(hidden, 0, _both)
    open_end = tl.minimum(prefix, keys_end)  # every row sees all keys before
    last = keys_end
    if IS_SEGMENTED:
        # A split has the segments that begin in its even share of the keys.
        first_segment = length * 0
        if WINDOW:
            first_segment = segment_at(keys_begin)
        end_segment = tl.where(keys_end > keys_begin, segment_at(keys_end - 1) + 1, first_segment)
        segment, stop = first_segment, end_segment
        if IS_SPLIT:
            share = tl.cdiv(keys_end - keys_begin, splits)
            end_before = keys_begin + split * share - 1  # the last key of the splits before
            if split > 0:
                segment = tl.minimum(segment_at(end_before) + 1, end_segment)
            if split < splits - 1:
                stop = tl.minimum(segment_at(end_before + share) + 1, end_segment)
        first = tl.maximum(segment_begin(segment), keys_begin // BLOCK_N * BLOCK_N)
        last = tl.minimum(segment_begin(stop), keys_end)
    elif WINDOW:
        first += keys_begin // RUN * RUN

    acc, acc_odd, top, total = no_sums(BLOCK_M, BLOCK_E, COLUMNS, IS_PAIRED)
    if IS_SEGMENTED and not IS_SPLIT:
        whole_acc, whole_top, whole_total = sink_sums(sinks, head, is_row, BLOCK_M, BLOCK_E)
    if key_scale_M is not None:
        scale_log2 *= tl.load(key_scale_M + kv_head)
    if not IS_FIRST_KNOWN:
        two_pages = _load_pages(pages, first + runs, last, PAGE_SIZE, FOLLOWS_STORE)
        next_page = _load_pages(pages, first + runs + step, last, PAGE_SIZE, FOLLOWS_STORE)
        two_pages |= next_page << 32
        third_page = _load_pages(pages, first + runs + 2 * step, last, PAGE_SIZE, FOLLOWS_STORE)
    # Keys are requested next, before the weights of the next kernel.
    if STARTS_EARLY and not HAS_EARLY_KEYS:
        tl.extra.cuda.gdc_launch_dependents()
    if STARTS_EARLY and HAS_EARLY_KEYS and first + BLOCK_N > prefix:
        tl.extra.cuda.gdc_wait()  # the first block may have rows of this call
    waited = 0  # see ``offset_after_wait``
    paced = tl.where(first + 2 * step < last, first, -1)
    for start in range(first, last, step):
        key = start + tl.arange(0, BLOCK_N)
        is_key = key < keys_end
        if WINDOW:
            is_key = is_key & (key >= keys_begin)
        run = start + runs
        slot = (two_pages & 0xFFFFFFFF) * PAGE_SIZE + run % PAGE_SIZE
        slot = tl.reshape(slot[:, None] + tl.arange(0, RUN)[None, :], [BLOCK_N])
        # Keys that depend on a load of their own block wait for it. Two pages share a word: Triton
        # keeps no loads in flight in a loop that hands a value over from two blocks before.
        two_pages = (two_pages >> 32) | (third_page << 32)
        third_page = _load_pages(pages, run + 3 * step, last, PAGE_SIZE, FOLLOWS_STORE)

        own_key = key - prefix
        seen = is_key  # by some row
        if IS_MASKED:
            if IS_WORD:
                # Keys before the mask are large unsigned numbers: their bit is the last, which is 0
                # unless the mask has a column for it.
                shift = tl.minimum(own_key.to(tl.uint32, bitcast=True), BITS - 1).to(WORD)
                visible = ((hidden[:, None] >> shift[None, :]) & 1) == 0
                seen = ((all_hidden >> shift) & 1) == 0
                if MASK_COLUMNS == BITS:
                    visible |= (own_key < 0)[None, :]
                    seen |= own_key < 0
                seen &= is_key
            else:
                cells = mask + token[:, None] * MASK_COLUMNS + own_key[None, :]
                is_cell = is_row[:, None] & ((own_key >= 0) & is_key)[None, :]
                visible = load_metadata(cells, is_cell, FOLLOWS_STORE) != 0
                visible |= (own_key < 0)[None, :]
                seen = is_key & (tl.max(visible.to(tl.int32), 0) != 0)
        else:
            visible = own_key[None, :] <= own_query[:, None]
        visible &= is_key[None, :]
        if WINDOW:
            visible &= key[None, :] >= own_begin[:, None]

        # Weight 0 times NaN is NaN, so a value that no query sees is not loaded.
        keys = key_cache + waited + kv_head * KEY_HEAD_STRIDE + slot * KEY_SLOT_STRIDE
        if SHARED:
            v = tl.load(
                keys[:, None] + dim[None, :], mask=seen[:, None] & is_dim[None, :], other=0.0
            )
            k = tl.trans(v)
        else:
            # Keys behind the last are hidden below, and every entry of the page table is a page.
            # Entries before a window need not be.
            is_cell = is_part[:, None] & is_key[None, :] if WINDOW else is_part[:, None]
            k = tl.load(keys[None, :] + part[:, None], mask=is_cell, other=0.0)
            values = value_cache + kv_head * VALUE_HEAD_STRIDE + slot * VALUE_SLOT_STRIDE
            if HAS_EARLY_KEYS and STARTS_EARLY:
                values += _offset_after_copies(start == paced)
            is_cell = seen[:, None] & is_part[None, :]
            v = tl.load(values[:, None] + part[None, :], mask=is_cell, other=0.0)
            if HAS_EARLY_KEYS:
                if STARTS_EARLY:
                    waited = offset_after_wait(start)
                elements = queries + waited + dim[None, :]
                q, q_odd, lack = load_queries(elements, is_dim[None, :], IS_PAIRED)
        scores = products(q, q_odd, k, IS_PAIRED, HAS_FLOAT8_CVT, PRECISION)
        if REST_DIM:
            is_cell = is_rest[:, None] & is_key[None, :]
            k_rest = tl.load(keys[None, :] + VALUE_DIM + rest[:, None], mask=is_cell, other=0.0)
            scores = tl.dot(q_rest, k_rest.to(q.dtype), scores, input_precision=PRECISION)
        scores = scaled(scores, lack, scale_log2, cap_log2, IS_PAIRED, HAS_CAP)
        if WINDOW or SHARED or start + BLOCK_N > open_end:
            scores = tl.where(visible, scores, float("-inf"))
        acc, acc_odd, top, total = add_block(
            acc, acc_odd, top, total, scores, v, q, IS_SEGMENTED, IS_PAIRED, HAS_FLOAT8_CVT,
            PRECISION,
        )  # fmt: skip
        if IS_SEGMENTED:
            is_end = start + BLOCK_N == segment_begin(segment + 1)
            if IS_SPLIT or not MASK_COLUMNS:
                is_end |= start + BLOCK_N >= last
            if is_end:
                own_acc, own_total = whole_sums(acc, acc_odd, total, IS_SEGMENTED, IS_PAIRED)
                if IS_SPLIT:
                    place = (segment - first_segment).to(tl.int64) * tokens * HEADS + token * HEADS
                    store_sums(
                        segment_acc, segment_top, segment_total, place + head, is_row, dim, own_acc,
                        top, own_total, VALUE_DIM,
                    )  # fmt: skip
                else:
                    whole_acc, whole_top, whole_total = joined(
                        whole_acc, whole_top, whole_total, own_acc, top, own_total
                    )
                segment += 1
                acc, acc_odd, top, total = no_sums(BLOCK_M, BLOCK_E, COLUMNS, IS_PAIRED)

    if STARTS_EARLY:
        tl.extra.cuda.gdc_wait()  # of programs without keys
    place = token * HEADS + head
    if not IS_SEGMENTED:
        own_acc, own_total = whole_sums(acc, acc_odd, total, IS_SEGMENTED, IS_PAIRED)
        if IS_SPLIT:
            first_segment, end_segment = 0, splits
            own_place = split.to(tl.int64) * tokens * HEADS + place
            store_sums(
                segment_acc, segment_top, segment_total, own_place, is_row, dim, own_acc, top,
                own_total, VALUE_DIM,
            )  # fmt: skip
        else:
            whole_acc, whole_top, whole_total = sink_sums(sinks, head, is_row, BLOCK_M, BLOCK_E)
            whole_acc, whole_top, whole_total = joined(
                whole_acc, whole_top, whole_total, own_acc, top, own_total
            )
    if IS_SPLIT:
        if split == 0:
            tl.store(segment_count + place, end_segment - first_segment, mask=is_row)
    elif MASK_COLUMNS and IS_SEGMENTED:
        store_sums(
            segment_acc, segment_top, segment_total, place, is_row, dim, whole_acc, whole_top,
            whole_total, VALUE_DIM,
        )  # fmt: skip
        own_acc, own_total = whole_sums(acc, acc_odd, total, IS_SEGMENTED, IS_PAIRED)
        store_sums(
            segment_acc, segment_top, segment_total, place + tokens * HEADS, is_row, dim, own_acc,
            top, own_total, VALUE_DIM,
        )  # fmt: skip
    else:
        value_scale = None
        if value_scale_M is not None:
            value_scale = tl.load(value_scale_M + kv_head)
        store_attended(out, place, is_row, dim, whole_acc, whole_total, value_scale, VALUE_DIM)

    if not MASK_COLUMNS and rows < width:
        # The requests before this one have request * width - begin unused lanes.
        spare = tl.load(cu_seqlens_q_B1 + requests) + request * width - begin + own_query - rows
        spare = spare.to(tl.int64)
        is_spare = (own_query >= rows) & (own_query < width) & (spare >= 0) & (spare < tokens)
        if IS_SPLIT:
            if split == 0:
                tl.store(segment_count + spare * HEADS + head, 0, mask=is_spare)
        else:
            cells = out + (spare[:, None] * HEADS + head[:, None]) * VALUE_DIM
            is_cell = is_spare[:, None] & is_dim[None, :]
            tl.store(cells + dim[None, :], 0.0, mask=is_cell)
