"""Paged attention of the many rows of a prompt, by specialised warpgroups of sm_90.

A program has a tile of query rows of one request for one key-value head, and all keys that they
see. It finds its tile in the rows of all requests: a batch has about as many programs as tiles. One
warpgroup copies blocks of keys and values into stages of shared memory. Two others multiply half of
the rows each: the products of one run while the other computes a softmax. A barrier counts the
copies of a block of keys, or of values, and another the warpgroups that have read it.

The bits of a row are those of ``paged_attention_kernel``: the keys have the same segments and
blocks, and all steps that round are those of ``attention_segments.py``.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from graphkit.ops.kernels.attention_segments import LOG2_E
from graphkit.ops.kernels.gluon_launch import gdc_launch_dependents, gdc_wait

ROWS = gl.constexpr(64)
"""Query rows of a warpgroup."""
KEYS = gl.constexpr(128)
"""Keys of a block: ``LARGE_KEYS`` of ``attention_config.py``."""
STAGES = gl.constexpr(2)
COLUMNS = gl.constexpr(8)
"""Columns of ``total``, the fewest of a product."""
REGISTERS = gl.constexpr(232)
"""Registers of a thread that multiplies. Those that copy have the other 40 of 504."""
KEY_ARRIVED, VALUE_ARRIVED, KEY_READ, VALUE_READ = map(gl.constexpr, range(4))
"""The barriers of a stage."""


@gluon.jit
def _barrier(barriers, kind: gl.constexpr, stage):
    """Return a barrier of a stage."""
    return barriers.index(kind * STAGES + stage)


@gluon.jit
def _segment_begin(segment):
    """Return the first block of a segment; see ``segment_begin`` of ``attention_segments.py``."""
    level = gl.maximum(segment // 8 - 1, 0)
    return (segment - 8 * level) << (1 + level)


@gluon.jit
def _rescaled(top, new_top):
    """Return the factor of sums; see ``rescaled`` of ``attention_segments.py``."""
    return gl.exp2(top - gl.where(new_top == float("-inf"), 0.0, new_top))


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _multiply(
    half: gl.constexpr, out, sinks, rows_tile, keys, values, ones, barriers, tile, kv_head, begin,
    rows, prefix, blocks, whole_blocks, scale_log2, HEADS: gl.constexpr, GROUP: gl.constexpr,
    DIM: gl.constexpr,
):  # fmt: skip
    """Attend from the rows of a half of the tile, and store the result.

    Some row of the tile sees keys of the first ``blocks``, and all rows see all keys of the first
    ``whole_blocks``.
    """
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    total_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, scores_layout)
    own_layout: gl.constexpr = gl.SliceLayout(1, layout)
    dtype: gl.constexpr = rows_tile.dtype
    queries = rows_tile.index(half)
    no_scores = gl.zeros([ROWS, KEYS], gl.float32, scores_layout)
    first_row = tile * (2 * ROWS) + half * ROWS
    row = first_row + gl.arange(0, ROWS, own_layout)
    head = kv_head * GROUP + row % GROUP
    is_row = row // GROUP < rows
    last_key = prefix + (first_row + gl.arange(0, ROWS, row_layout)) // GROUP

    whole_acc = gl.zeros([ROWS, DIM], gl.float32, layout)
    whole_top = gl.full([ROWS], float("-inf"), gl.float32, own_layout)
    whole_total = gl.zeros([ROWS], gl.float32, own_layout)
    if sinks is not None:
        whole_top = gl.load(sinks + head, mask=is_row, other=0.0).to(gl.float32)
        whole_top *= LOG2_E
        whole_total += 1.0
    segment, stop = 0, 0
    while stop < blocks:
        start = stop
        segment += 1
        stop = gl.minimum(_segment_begin(segment), blocks)
        acc = gl.zeros([ROWS, DIM], gl.float32, layout)
        total = gl.zeros([ROWS, COLUMNS], gl.float32, total_layout)
        top = gl.full([ROWS], float("-inf"), gl.float32, row_layout)
        for block in range(start, stop):
            stage, phase = block % STAGES, block // STAGES & 1
            mbarrier.wait(_barrier(barriers, KEY_ARRIVED, stage), phase)
            key_tile = keys.index(stage).permute((1, 0))
            scores = warpgroup_mma(queries, key_tile, no_scores, use_acc=False)
            mbarrier.arrive(_barrier(barriers, KEY_READ, stage))
            scores *= scale_log2
            if block >= whole_blocks:
                key = block * KEYS + gl.arange(0, KEYS, gl.SliceLayout(0, scores_layout))
                scores = gl.where(key[None, :] <= last_key[:, None], scores, float("-inf"))
            new_top = gl.maximum(top, gl.max(scores, 1))
            base = gl.where(new_top == float("-inf"), 0.0, new_top)
            weights = gl.exp2(scores - base[:, None]).to(dtype)
            shrink = _rescaled(top, new_top)
            top = new_top
            acc *= gl.convert_layout(shrink, own_layout)[:, None]
            total *= gl.convert_layout(shrink, gl.SliceLayout(1, total_layout))[:, None]
            left = gl.convert_layout(weights, gl.DotOperandLayout(0, layout, 2))
            left_of_ones = gl.convert_layout(weights, gl.DotOperandLayout(0, total_layout, 2))
            mbarrier.wait(_barrier(barriers, VALUE_ARRIVED, stage), phase)
            sums = warpgroup_mma(left, values.index(stage), acc, is_async=True)
            totals = warpgroup_mma(left_of_ones, ones.permute((1, 0)), total, is_async=True)
            acc, total = warpgroup_mma_wait(0, deps=(sums, totals))
            mbarrier.arrive(_barrier(barriers, VALUE_READ, stage))
        column = gl.arange(0, COLUMNS, gl.SliceLayout(0, total_layout))
        own_total = gl.sum(gl.where(column[None, :] == 0, total, 0.0), 1)
        own_total = gl.convert_layout(own_total, own_layout)
        own_top = gl.convert_layout(top, own_layout)
        new_top = gl.maximum(whole_top, own_top)
        factor, own_factor = _rescaled(whole_top, new_top), _rescaled(own_top, new_top)
        whole_acc = gl.fma(whole_acc, factor[:, None], acc * own_factor[:, None])
        whole_total = gl.fma(whole_total, factor, own_total * own_factor)
        whole_top = new_top

    divisor = gl.where(whole_total == 0.0, -1.0, whole_total)
    result = gl.where(divisor[:, None] < 0.0, 0.0, whole_acc * (1.0 / divisor)[:, None])
    place = (begin + row // GROUP).to(gl.int64) * HEADS + head
    cells = out + place[:, None] * DIM + gl.arange(0, DIM, gl.SliceLayout(0, layout))[None, :]
    gl.store(cells, result.to(out.dtype.element_ty), mask=is_row[:, None])


@gluon.jit
def _copy(
    key_cache, value_cache, pages, keys, values, slots, barriers, last, blocks,
    KEY_SLOT_STRIDE: gl.constexpr, VALUE_SLOT_STRIDE: gl.constexpr, PAGE_SIZE: gl.constexpr,
    DIM: gl.constexpr,
):  # fmt: skip
    """Copy blocks of keys and values, zeros behind the last key.

    A thread loads the page of one key of the next block, and shares its slot in shared memory.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    place: gl.constexpr = gl.SliceLayout(1, layout)
    dim = gl.arange(0, DIM, gl.SliceLayout(0, layout))
    key = gl.arange(0, KEYS, gl.BlockedLayout([1], [32], [4], [0]))
    page = gl.load(pages + key // PAGE_SIZE, mask=key < last, other=0)
    for block in range(blocks):
        stage, phase = block % STAGES, block // STAGES & 1
        own = slots.index(stage)
        own.store(gl.where(key < last, page * PAGE_SIZE + key % PAGE_SIZE, -1))
        key += KEYS
        page = gl.load(pages + key // PAGE_SIZE, mask=key < last, other=0)
        mbarrier.wait(_barrier(barriers, KEY_READ, stage), phase ^ 1)
        slot = own.load(place)[:, None]
        cells = key_cache + slot.to(gl.int64) * KEY_SLOT_STRIDE + dim[None, :]
        async_copy.async_copy_global_to_shared(keys.index(stage), cells, mask=slot >= 0)
        async_copy.mbarrier_arrive(_barrier(barriers, KEY_ARRIVED, stage), increment_count=False)
        mbarrier.wait(_barrier(barriers, VALUE_READ, stage), phase ^ 1)
        slot = own.load(place)[:, None]
        cells = value_cache + slot.to(gl.int64) * VALUE_SLOT_STRIDE + dim[None, :]
        async_copy.async_copy_global_to_shared(values.index(stage), cells, mask=slot >= 0)
        async_copy.mbarrier_arrive(_barrier(barriers, VALUE_ARRIVED, stage), increment_count=False)


@gluon.jit(do_not_specialize=["tokens", "max_keys", "max_pages", "requests"])
def prompt_attention_kernel(
    out, query, key_cache, value_cache, page_table, cache_seqlens_B, cu_seqlens_q_B1, sinks,
    query_token_stride, query_head_stride, tokens, max_keys, max_pages, requests, scale_log2,
    KEY_SLOT_STRIDE: gl.constexpr, KEY_HEAD_STRIDE: gl.constexpr, VALUE_SLOT_STRIDE: gl.constexpr,
    VALUE_HEAD_STRIDE: gl.constexpr, PAGE_SIZE: gl.constexpr, HEADS: gl.constexpr,
    GROUP: gl.constexpr, DIM: gl.constexpr, BLOCK_B: gl.constexpr, STARTS_EARLY: gl.constexpr,
):  # fmt: skip
    """One program per tile of a request and key-value head, those with the most keys first.

    Rows behind those of the last request are those of one more request, without keys.
    """
    if STARTS_EARLY:
        gdc_wait()
        gdc_launch_dependents()
    kv_head = gl.program_id(0) % (HEADS // GROUP)
    turn = gl.program_id(0) // (HEADS // GROUP)
    request_layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    index = gl.arange(0, BLOCK_B, request_layout)
    begins = gl.load(cu_seqlens_q_B1 + index, mask=index <= requests, other=0)
    begins = gl.maximum(begins, 0)
    ends = gl.load(cu_seqlens_q_B1 + index + 1, mask=index < requests, other=0)
    ends = gl.where(index == requests, tokens, gl.minimum(ends, tokens))
    counts = gl.where(index <= requests, gl.maximum(ends - begins, 0), 0)
    tiles = (counts * GROUP + 2 * ROWS - 1) // (2 * ROWS)
    last_tiles = gl.associative_scan(tiles, 0, _add)
    request = gl.sum((last_tiles <= turn).to(gl.int32), 0)
    is_own = index == request
    # The last tile of a request sees the most keys.
    tile = gl.maximum(gl.sum(gl.where(is_own, last_tiles, 0), 0) - 1 - turn, 0)
    rows = gl.sum(gl.where(is_own, counts, 0), 0)  # 0 for programs behind the last tile
    begin = gl.sum(gl.where(is_own, begins, 0), 0)
    own = gl.minimum(request, requests - 1)
    length = gl.where(request < requests, gl.load(cache_seqlens_B + own), 0)
    prefix = length - rows
    first_row = tile * (2 * ROWS)
    last_query = gl.minimum((first_row + 2 * ROWS - 1) // GROUP, rows - 1)
    last = gl.minimum(gl.minimum(length, max_keys), prefix + last_query + 1)
    last = gl.where(request < requests, gl.maximum(last, 0), 0)
    blocks = (last + KEYS - 1) // KEYS
    # Every row sees all keys of the blocks before.
    whole_blocks = gl.maximum(gl.minimum(prefix + first_row // GROUP + 1, last), 0) // KEYS

    dtype: gl.constexpr = key_cache.dtype.element_ty
    tile_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    rows_tile = gl.allocate_shared_memory(dtype, [2, ROWS, DIM], tile_layout)
    keys = gl.allocate_shared_memory(dtype, [STAGES, KEYS, DIM], tile_layout)
    values = gl.allocate_shared_memory(dtype, [STAGES, KEYS, DIM], tile_layout)
    ones = gl.allocate_shared_memory(dtype, [COLUMNS, KEYS], tile_layout)
    slot_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    slots = gl.allocate_shared_memory(gl.int32, [STAGES, KEYS], slot_layout)
    barriers = gl.allocate_shared_memory(gl.int64, [4 * STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(_barrier(barriers, KEY_ARRIVED, stage), count=128)
        mbarrier.init(_barrier(barriers, VALUE_ARRIVED, stage), count=128)
        mbarrier.init(_barrier(barriers, KEY_READ, stage), count=2)
        mbarrier.init(_barrier(barriers, VALUE_READ, stage), count=2)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    one_layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    ones.store(gl.full([COLUMNS, KEYS], 1.0, dtype, one_layout))
    dim = gl.arange(0, DIM, gl.SliceLayout(0, layout))
    for half in gl.static_range(2):
        row = first_row + half * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
        token = gl.maximum(begin + gl.minimum(row // GROUP, rows - 1), 0).to(gl.int64)
        own_head = kv_head * GROUP + row % GROUP
        cells = query + token * query_token_stride + own_head * query_head_stride
        rows_tile.index(half).store(gl.load(cells[:, None] + dim[None, :]))
    fence_async_shared()
    pages = page_table + own.to(gl.int64) * max_pages
    key_cache += kv_head.to(gl.int64) * KEY_HEAD_STRIDE
    value_cache += kv_head.to(gl.int64) * VALUE_HEAD_STRIDE
    # A tuple that has a name would hold tensors instead of constants.
    gl.warp_specialize(
        [
            (
                _copy,
                (
                    key_cache, value_cache, pages, keys, values, slots, barriers, last, blocks,
                    KEY_SLOT_STRIDE, VALUE_SLOT_STRIDE, PAGE_SIZE, DIM,
                ),
            ),
            (
                _multiply,
                (
                    0, out, sinks, rows_tile, keys, values, ones, barriers, tile, kv_head, begin,
                    rows, prefix, blocks, whole_blocks, scale_log2, HEADS, GROUP, DIM,
                ),
            ),
            (
                _multiply,
                (
                    1, out, sinks, rows_tile, keys, values, ones, barriers, tile, kv_head, begin,
                    rows, prefix, blocks, whole_blocks, scale_log2, HEADS, GROUP, DIM,
                ),
            ),
        ],
        [4, 4], [REGISTERS, REGISTERS],
    )  # fmt: skip
