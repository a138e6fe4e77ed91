"""The kernel of paged attention.

One program handles a tile of one request's query rows for one key-value head, and one split of that
request's keys. A tile holds the W rows of all query heads that share the key-value head, if they
fit. The unused lanes of requests with fewer than W rows write zeros into the rows that no request
has, so that no further launch has to clear them. With a mask every request has W rows, and
cu_seqlens_q is not read.

The bits of a row do not depend on the launch. Keys are divided into segments by their position
(``segment_at``), and segments into blocks. The softmax of a segment is computed block by block, and
segments are joined in order (``joined``): in registers if a program has all keys of its rows, and
by a second kernel if they are split, whose programs store each of their segments. Weights are added
up by a product with ones, since the order of a sum over the lanes of a tile depends on the tile. A
compiler that fuses multiplications and additions as it likes would do so in some variants of a
kernel only: kernels are launched with ``enable_fp_fusion=False``.

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

from graphkit.ops.kernels.float8 import float8_pairs
from graphkit.ops.kernels.launch import KEPT_IN_L2, offset_after_wait, wait_for_kernel_before

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _both(a, b):
    return a & b


@triton.jit
def _load_metadata(entry, mask, FOLLOWS_STORE: tl.constexpr):
    """Load entries of a table, of lengths or of a mask; 0 outside of ``mask``.

    Before a program waits, the L1 cache may have older ones.
    """
    if FOLLOWS_STORE:
        loaded = tl.load(entry, mask=mask, other=0, cache_modifier=".cg")
    else:
        loaded = tl.load(entry, mask=mask, other=0, eviction_policy=KEPT_IN_L2)
    return loaded


@triton.jit
def _load_pages(pages, run, end, PAGE_SIZE: tl.constexpr, FOLLOWS_STORE: tl.constexpr):
    """Return the page of each run of keys, int64; 0 for runs from ``end`` on."""
    return _load_metadata(pages + run // PAGE_SIZE, run < end, FOLLOWS_STORE).to(tl.int64)


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


@triton.jit
def _window_begin(position, WINDOW: tl.constexpr, CHUNKED: tl.constexpr):
    """Return the first position that rows at some positions see."""
    begin = position - WINDOW + 1
    if CHUNKED:
        begin = tl.maximum(position, 0) // WINDOW * WINDOW
    return begin


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
def rescaled(top, new_top):
    """Return the factor of sums whose scores were relative to a lower maximum."""
    # Without this, a row that has seen no key yet would compute inf - inf.
    return tl.exp2(top - tl.where(new_top == float("-inf"), 0.0, new_top))


@triton.jit
def joined(acc, top, total, own_acc, own_top, own_total):
    """Return the sums of values, the maximum and the sum of weights of two groups of keys."""
    new_top = tl.maximum(top, own_top)
    factor, own_factor = rescaled(top, new_top), rescaled(own_top, new_top)
    acc = tl.fma(acc, factor[:, None], own_acc * own_factor[:, None])
    return acc, new_top, tl.fma(total, factor, own_total * own_factor)


@triton.jit
def attended(acc, total):
    """Return the mean of values from their sum and the sum of their weights."""
    # The sum of a row without keys is 0 times values that other rows see, which may be NaN.
    divisor = tl.where(total == 0.0, -1.0, total)
    return tl.where(divisor[:, None] < 0.0, 0.0, acc * (1.0 / divisor)[:, None])


@triton.jit
def _load_queries(elements, is_inside, IS_PAIRED: tl.constexpr):
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


# Prompts have any width: specialisation would compile this kernel for each. Trees have few. What a
# model fixes, heads and strides of its cache, is constant: short code starts and runs sooner.
@triton.jit(
    do_not_specialize=["tokens", "max_keys", "max_pages", "requests", "width", "splits"],
    do_not_specialize_on_alignment=["row_tiles"],
)
def paged_attention_kernel(
    out, segment_acc, segment_top, segment_total, segment_count, query, key_cache, value_cache, page_table, cache_seqlens_B, cu_seqlens_q_B1, mask,
    sinks, key_scale_M, value_scale_M, query_token_stride, query_head_stride,
    tokens, max_keys, max_pages, requests, row_tiles, width, splits, scale_log2, cap_log2,
    KEY_SLOT_STRIDE: tl.constexpr, KEY_HEAD_STRIDE: tl.constexpr,
    VALUE_SLOT_STRIDE: tl.constexpr, VALUE_HEAD_STRIDE: tl.constexpr,
    PAGE_SIZE: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr,
    VALUE_DIM: tl.constexpr, REST_DIM: tl.constexpr, SHARED: tl.constexpr,
    MASK_ROWS: tl.constexpr, MASK_COLUMNS: tl.constexpr, BLOCK_C: tl.constexpr,
    WINDOW: tl.constexpr, CHUNKED: tl.constexpr, HAS_CAP: tl.constexpr,
    IS_SPLIT: tl.constexpr, STARTS_EARLY: tl.constexpr, FOLLOWS_STORE: tl.constexpr,
    HAS_EARLY_KEYS: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, RUN: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_R: tl.constexpr,
    HAS_FLOAT8_CVT: tl.constexpr,
):  # fmt: skip
    """One program per (request, row tile), key-value head and split."""
    if STARTS_EARLY and not FOLLOWS_STORE:
        tl.extra.cuda.gdc_wait()
    # A row of the mask is a word of what it hides, so that no block of keys waits for the mask.
    BITS: tl.constexpr = 64 if MASK_COLUMNS > 32 else 32
    WORD: tl.constexpr = tl.int64 if MASK_COLUMNS > 32 else tl.int32
    IS_WORD: tl.constexpr = MASK_COLUMNS <= 64
    IS_PAIRED: tl.constexpr = key_cache.dtype.element_ty == tl.int16
    split = tl.program_id(1)
    kv_head = (tl.program_id(0) % (HEADS // GROUP)).to(tl.int64)
    tile = tl.program_id(0) // (HEADS // GROUP)
    request = tile // row_tiles
    # There are more programs than requests if there are more rows than the requests can have.
    pages = page_table + tl.minimum(request, requests - 1).to(tl.int64) * max_pages
    # Runs of RUN keys lie in one page each. The page number of a run is loaded once and spread over
    # its keys. In large blocks a load per key is faster: RUN is 1.
    runs = tl.arange(0, BLOCK_N // RUN) * RUN

    first_row = tile % row_tiles * BLOCK_M
    row = first_row + tl.arange(0, BLOCK_M)
    own_query = row // GROUP
    own_length = cache_seqlens_B + tl.minimum(request, requests - 1)
    length = _load_metadata(own_length, request < requests, FOLLOWS_STORE)
    if MASK_COLUMNS:
        width = MASK_ROWS
        begin, end = request * width, tokens
    else:
        first_of_own = cu_seqlens_q_B1 + tl.minimum(request, requests)
        first_of_next = cu_seqlens_q_B1 + tl.minimum(request + 1, requests)
        begin = tl.maximum(_load_metadata(first_of_own, True, FOLLOWS_STORE), 0)
        end = tl.minimum(_load_metadata(first_of_next, True, FOLLOWS_STORE), tokens)
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
        q, q_odd, lack = _load_queries(queries + dim[None, :], is_dim[None, :], IS_PAIRED)
    if REST_DIM:
        rest = tl.arange(0, BLOCK_R)
        is_rest = rest < REST_DIM
        q_rest = tl.load(queries + VALUE_DIM + rest[None, :], mask=is_rest[None, :], other=0.0)

    # The keys that some row of this tile may see.
    keys_begin, keys_end = 0, tl.minimum(length, max_keys)
    if MASK_COLUMNS:
        mask_row = mask + token[:, None] * MASK_COLUMNS
        column = tl.arange(0, BLOCK_C)
        is_entry = (own_query < width)[:, None] & (column < MASK_COLUMNS)[None, :]
        path = _load_metadata(mask_row + column[None, :], is_entry, FOLLOWS_STORE) != 0
        if WINDOW:
            # Positions are numbers of keys: those before the mask, then those of the path.
            path &= (column + prefix >= 0)[None, :]
            before = tl.maximum(prefix, 0)
            position = before + tl.sum(path.to(tl.int32), 1) - 1
            window_begin = _window_begin(position, WINDOW, CHUNKED)
            if CHUNKED or WINDOW < MASK_COLUMNS:  # a window may begin within the path
                path &= before + tl.cumsum(path.to(tl.int32), 1) > window_begin[:, None]
                first_column = tl.min(tl.where(path, column[None, :], MASK_COLUMNS), 1)
                window_begin = tl.where(window_begin > prefix, prefix + first_column, window_begin)
            window_begin = tl.where(own_query < width, window_begin, length)
            keys_begin = tl.maximum(tl.min(window_begin, 0), 0)
        if IS_WORD:
            bit = tl.full([1, 1], 1, WORD) << column[None, :].to(WORD)
            hidden = tl.sum(tl.where(path | (column >= MASK_COLUMNS)[None, :], 0, bit), 1)
            all_hidden = tl.reduce(hidden, 0, _both)
    else:
        last_query = tl.minimum((first_row + BLOCK_M - 1) // GROUP, rows - 1)
        keys_end = tl.minimum(keys_end, prefix + last_query + 1)
        if WINDOW:
            window_begin = _window_begin(prefix + own_query, WINDOW, CHUNKED)
            first_begin = _window_begin(prefix + first_row // GROUP, WINDOW, CHUNKED)
            keys_begin = tl.maximum(first_begin, 0)
    keys_end = tl.maximum(keys_end, keys_begin)
    open_end = tl.minimum(prefix, keys_end)  # every row sees all keys before
    # A split has the segments that begin in its even share of the keys.
    first_segment = length * 0
    if WINDOW:
        first_segment = segment_at(keys_begin)
    end_segment = tl.where(keys_end > keys_begin, segment_at(keys_end - 1) + 1, first_segment)
    segment, stop = first_segment, end_segment
    if IS_SPLIT:
        share = tl.cdiv(keys_end - keys_begin, splits)
        before = keys_begin + split * share - 1  # the last key of the splits before
        if split > 0:
            segment = tl.minimum(segment_at(before) + 1, end_segment)
        if split < splits - 1:
            stop = tl.minimum(segment_at(before + share) + 1, end_segment)
        if split == 0:
            rows_of_tile = token * HEADS + head
            tl.store(segment_count + rows_of_tile, end_segment - first_segment, mask=is_row)
    first = tl.maximum(segment_begin(segment), keys_begin // BLOCK_N * BLOCK_N)
    last = tl.minimum(segment_begin(stop), keys_end)

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M, 16], tl.float32)  # the same sum in each column
    if IS_PAIRED:
        acc = tl.zeros([BLOCK_M, BLOCK_E // 2], tl.float32)
        acc_odd = tl.zeros([BLOCK_M, BLOCK_E // 2], tl.float32)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    if not IS_SPLIT:  # sums over all segments before, the sink first
        whole_top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        whole_total = tl.zeros([BLOCK_M], tl.float32)
        whole_acc = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
        if sinks is not None:
            whole_top = tl.load(sinks + head).to(tl.float32) * LOG2_E
            whole_total += 1.0
    if key_scale_M is not None:
        scale_log2 *= tl.load(key_scale_M + kv_head)
    two_pages = _load_pages(pages, first + runs, last, PAGE_SIZE, FOLLOWS_STORE)
    next_page = _load_pages(pages, first + runs + BLOCK_N, last, PAGE_SIZE, FOLLOWS_STORE)
    two_pages |= next_page << 32
    third_page = _load_pages(pages, first + runs + 2 * BLOCK_N, last, PAGE_SIZE, FOLLOWS_STORE)
    # Keys are requested next, before the weights of the next kernel.
    if STARTS_EARLY and not HAS_EARLY_KEYS:
        tl.extra.cuda.gdc_launch_dependents()
    if STARTS_EARLY and HAS_EARLY_KEYS and first + BLOCK_N > prefix:
        tl.extra.cuda.gdc_wait()  # the first block may have rows of this call
    waited = 0  # see ``offset_after_wait``
    paced = tl.where(first + 2 * BLOCK_N < last, first, -1)
    for start in range(first, last, BLOCK_N):
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
        third_page = _load_pages(pages, run + 3 * BLOCK_N, last, PAGE_SIZE, FOLLOWS_STORE)

        own_key = key - prefix
        if MASK_COLUMNS and IS_WORD:
            # Keys before the mask are large unsigned numbers: their bit is the last, which is 0
            # unless the mask has a column for it.
            shift = tl.minimum(own_key.to(tl.uint32, bitcast=True), BITS - 1).to(WORD)
            visible = ((hidden[:, None] >> shift[None, :]) & 1) == 0
            seen = ((all_hidden >> shift) & 1) == 0
            if MASK_COLUMNS == BITS:
                visible |= (own_key < 0)[None, :]
                seen |= own_key < 0
            visible &= is_key[None, :]
            seen &= is_key
        elif MASK_COLUMNS:
            is_column = (own_key >= 0) & is_key
            is_cell = (own_query < width)[:, None] & is_column[None, :]
            tree = _load_metadata(mask_row + own_key[None, :], is_cell, FOLLOWS_STORE) != 0
            visible = (tree | (own_key < 0)[None, :]) & is_key[None, :]
        else:
            visible = (own_key[None, :] <= own_query[:, None]) & is_key[None, :]
            seen = is_key  # its last query sees all of a chain's keys
        if WINDOW:
            visible = visible & (key[None, :] >= window_begin[:, None])
        if MASK_COLUMNS and not IS_WORD:
            seen = tl.max(visible.to(tl.int32), 0) != 0

        # Weight 0 times NaN is NaN, so a value that no query sees is not loaded.
        keys = key_cache + waited + kv_head * KEY_HEAD_STRIDE + slot * KEY_SLOT_STRIDE
        if SHARED:
            v = tl.load(
                keys[:, None] + dim[None, :], mask=seen[:, None] & is_dim[None, :], other=0.0
            )
            scores = tl.dot(q, tl.trans(v.to(q.dtype)), input_precision=PRECISION)
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
                q, q_odd, lack = _load_queries(elements, is_dim[None, :], IS_PAIRED)
            if IS_PAIRED:
                k, k_odd = float8_pairs(k, HAS_FLOAT8_CVT)
                scores = tl.dot(q, k)
                scores = tl.dot(q_odd, k_odd, scores)
            else:
                scores = tl.dot(q, k.to(q.dtype), input_precision=PRECISION)
        if REST_DIM:
            is_cell = is_rest[:, None] & is_key[None, :]
            k_rest = tl.load(keys[None, :] + VALUE_DIM + rest[:, None], mask=is_cell, other=0.0)
            scores = tl.dot(q_rest, k_rest.to(q.dtype), scores, input_precision=PRECISION)
        if IS_PAIRED:
            scores *= (scale_log2 * lack)[:, None]
        else:
            scores *= scale_log2
        if HAS_CAP:  # cap * tanh(score / cap)
            scores = (2.0 * tl.sigmoid(2.0 * scores) - 1.0) * cap_log2
        if WINDOW or SHARED or start + BLOCK_N > open_end:
            scores = tl.where(visible, scores, float("-inf"))

        new_top = tl.maximum(top, tl.max(scores, 1))
        # The base of a row that has seen no key yet: without it, it would compute inf - inf.
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(scores - base[:, None]).to(q.dtype)
        shrink = rescaled(top, new_top)[:, None]
        ones = tl.full([BLOCK_N, 16], 1.0, tl.float32).to(q.dtype)
        total = tl.dot(weights, ones, total * shrink, input_precision=PRECISION)
        acc = acc * shrink
        if IS_PAIRED:
            v, v_odd = float8_pairs(v, HAS_FLOAT8_CVT)
            acc_odd = tl.dot(weights, v_odd, acc_odd * shrink)
        acc = tl.dot(weights, v.to(q.dtype), acc, input_precision=PRECISION)
        top = new_top
        if (start + BLOCK_N == segment_begin(segment + 1)) | (start + BLOCK_N >= last):
            own_acc = tl.interleave(acc, acc_odd) if IS_PAIRED else acc
            own_total = tl.sum(tl.where(tl.arange(0, 16)[None, :] == 0, total, 0.0), 1)
            if IS_SPLIT:
                # The compiler sees that rows are aligned, and stores 16 bytes at a time.
                of_segment = (segment - first_segment).to(tl.int64) * tokens * HEADS
                place = of_segment + token * HEADS + head
                is_stored = is_row[:, None] & is_dim[None, :]
                sums = segment_acc + place[:, None] * VALUE_DIM + dim[None, :]
                tl.store(sums, own_acc, mask=is_stored)
                tl.store(segment_top + place, top, mask=is_row)
                tl.store(segment_total + place, own_total, mask=is_row)
            else:
                whole_acc, whole_top, whole_total = joined(
                    whole_acc, whole_top, whole_total, own_acc, top, own_total
                )
            segment += 1
            top = tl.full([BLOCK_M], float("-inf"), tl.float32)
            total = tl.zeros([BLOCK_M, 16], tl.float32)
            acc = tl.zeros_like(acc)
            if IS_PAIRED:
                acc_odd = tl.zeros_like(acc_odd)

    if STARTS_EARLY:
        tl.extra.cuda.gdc_wait()  # of programs without keys
    if not IS_SPLIT:
        result = attended(whole_acc, whole_total)
        if value_scale_M is not None:
            result *= tl.load(value_scale_M + kv_head)
        cells = out + (token[:, None] * HEADS + head[:, None]) * VALUE_DIM
        is_cell = is_row[:, None] & is_dim[None, :]
        tl.store(cells + dim[None, :], result.to(out.dtype.element_ty), mask=is_cell)

    if rows < width:
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


@triton.jit(do_not_specialize=["rows"])
def join_segments_kernel(
    out, segment_acc, segment_top, segment_total, segment_count, sinks, value_scale_M, rows,
    HEADS: tl.constexpr, GROUP: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr, STARTS_EARLY: tl.constexpr,
):  # fmt: skip
    """One program per BLOCK_R (token, head) rows and BLOCK_D of their dimensions."""
    wait_for_kernel_before(STARTS_EARLY)
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    dim = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    is_row = row < rows
    is_dim = (dim < VALUE_DIM)[None, :]
    count = tl.load(segment_count + row, mask=is_row, other=0)
    acc = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
    top = tl.full([BLOCK_R], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_R], tl.float32)
    if sinks is not None:
        top = tl.load(sinks + row % HEADS, mask=is_row, other=0.0).to(tl.float32) * LOG2_E
        total += 1.0
    place = row
    for segment in range(0, tl.max(count, 0)):
        is_segment = segment < count
        own_top = tl.load(segment_top + place, mask=is_segment, other=float("-inf"))
        own_total = tl.load(segment_total + place, mask=is_segment, other=0.0)
        cells = segment_acc + place[:, None] * VALUE_DIM + dim[None, :]
        own_acc = tl.load(cells, mask=is_segment[:, None] & is_dim, other=0.0)
        acc, top, total = joined(acc, top, total, own_acc, own_top, own_total)
        place += rows
    result = attended(acc, total)
    if value_scale_M is not None:
        result *= tl.load(value_scale_M + row % HEADS // GROUP, mask=is_row, other=0.0)[:, None]
    cells = out + row[:, None] * VALUE_DIM + dim[None, :]
    tl.store(cells, result.to(out.dtype.element_ty), mask=is_row[:, None] & is_dim)
