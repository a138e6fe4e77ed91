"""The KV pools: reserved rows and slots, free lists, and every refusal."""

from __future__ import annotations

import re
from contextlib import suppress

import pytest
import torch

from engine_runs import refuses
from graphkit.engine.kv import (
    DSATokenToKVPool,
    MHATokenToKVPool,
    MLATokenToKVPool,
    ReqToTokenPool,
    TokenSlotAllocator,
)
from graphkit.engine.kv.pool import LayerGroupKVPool
from graphkit.engine.kv.slots import FreeList
from graphkit.errors import AttentionError, ConfigError
from interruptions import lines_of, raising_at

KV = {
    "size": 8, "page_size": 4, "dtype": torch.bfloat16, "head_num": 2, "head_dim": 16,
    "layer_num": 3, "device": "cpu",
}  # fmt: skip


def test_kv_buffers_hold_one_dummy_page_more():
    pool = MHATokenToKVPool(**KV)
    tensors = pool.tensors()
    assert list(tensors) == [f"{kind}.{layer}" for kind in ("key", "value") for layer in range(3)]
    for tensor in tensors.values():
        assert tensor.shape == (12, 2, 16)
        assert tensor.dtype == torch.bfloat16
        assert tensor.eq(0).all()
    assert pool.get_key_buffer(2) is tensors["key.2"]
    assert pool.get_value_buffer(0) is tensors["value.0"]
    assert len({tensor.data_ptr() for tensor in tensors.values()}) == 6


@pytest.mark.parametrize(("size", "slots"), [(1, 8), (4, 8), (5, 12)])
def test_kv_buffers_have_whole_pages(size, slots):
    """Attention reads the last page of a request to its end."""
    pool = MHATokenToKVPool(**KV | {"size": size, "page_size": 4})
    assert len(pool.get_key_buffer(0)) == len(pool.get_value_buffer(0)) == slots


def test_set_kv_buffer_writes_one_layer():
    pool = MHATokenToKVPool(**KV)
    key, value = torch.randn(2, 2, 16), torch.randn(2, 2, 16)
    pool.set_kv_buffer(1, torch.tensor([11, 4]), key, value)
    assert torch.equal(pool.get_key_buffer(1)[[11, 4]], key.bfloat16())
    assert torch.equal(pool.get_value_buffer(1)[[11, 4]], value.bfloat16())
    assert sum(int(tensor.count_nonzero() > 0) for tensor in pool.tensors().values()) == 2


@pytest.mark.parametrize("layer", [-1, 3, "0", None, 1.0, True, [0]], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_kv_layer_is_checked(layer, dtype):
    pool = MHATokenToKVPool(**KV | {"dtype": dtype})
    for get in (pool.get_key_buffer, pool.get_value_buffer, pool.get_scales):
        with pytest.raises(AttentionError, match=f"no layer {re.escape(repr(layer))}: it has 3"):
            get(layer)


@pytest.mark.parametrize(
    ("groups", "field"),
    [
        (lambda _: [], "groups"),
        (lambda _: 3, "groups"),
        (lambda _: None, "groups"),
        (lambda _: [1], "groups[0]"),
        (lambda pool: [pool, ReqToTokenPool(1, 1, "cpu")], "groups[1]"),
        (lambda pool: [pool, MHATokenToKVPool(**KV | {"size": 4})], "groups"),
    ],
    ids=["no pool", "int", "None", "ints", "another pool", "another size"],
)
def test_layer_groups_are_kv_pools_of_one_size(groups, field):
    pool = MHATokenToKVPool(**KV)
    with pytest.raises(ConfigError) as caught:
        LayerGroupKVPool(groups(pool))
    assert caught.value.field == field


def test_request_rows_come_and_go():
    pool = ReqToTokenPool(3, 10, "cpu")
    assert pool.req_to_token.shape == (4, 10)
    assert pool.req_to_token.dtype == torch.int32
    assert pool.req_to_token.eq(0).all()
    assert pool.alloc(2) == [1, 2]
    assert pool.alloc(0) == []
    assert pool.available == 1
    pool.free([1])
    assert sorted(pool.alloc(2)) == [1, 3]


def test_an_interrupted_allocation_allocates_nothing():
    def used():
        rows = FreeList(6)
        rows.free(rows.alloc(4)[1:3])
        return rows

    expected = used().alloc(4)
    lines = lines_of(lambda: used().alloc(4))
    ours = [line for line in lines if line.code.co_filename.endswith("slots.py")]
    assert len(ours) > 5
    for line in ours:
        for occurrence in range(1, lines[line] + 1):
            rows = used()
            interrupted = raising_at(line, occurrence, KeyboardInterrupt())
            with interrupted as was_raised, suppress(KeyboardInterrupt):
                rows.alloc(4)
            assert not was_raised() or (len(rows), rows.alloc(4)) == (4, expected), str(line)


@pytest.mark.parametrize("page_size", [1, 4])
def test_slots_are_whole_pages_beyond_the_first(page_size):
    slots = TokenSlotAllocator(8 * page_size, page_size)
    taken = slots.alloc(8 * page_size)
    assert taken.dtype == torch.int64
    assert sorted(taken.tolist()) == list(range(page_size, 9 * page_size))
    assert taken.view(-1, page_size).diff(dim=1).eq(1).all()
    assert slots.available == 0
    slots.free(taken[page_size : 3 * page_size].flip(0))
    again = slots.alloc(2 * page_size)
    assert sorted(again.tolist()) == list(range(2 * page_size, 4 * page_size))


def test_an_incomplete_last_page_is_left_out():
    slots = TokenSlotAllocator(11, 4)
    assert slots.available == 8
    assert max(slots.alloc(8).tolist()) == 11


def test_slots_fit_the_pool():
    pool = MHATokenToKVPool(**KV)
    highest = int(TokenSlotAllocator(pool.size, pool.page_size).alloc(8).max())
    assert highest == pool.page_size + pool.size - 1 == pool.get_key_buffer(0).shape[0] - 1


MLA = {name: KV[name] for name in ("size", "page_size", "dtype", "layer_num", "device")} | {
    "kv_lora_rank": 12, "qk_rope_head_dim": 5,
}  # fmt: skip
KINDS = [
    (MHATokenToKVPool, KV, ("head_num", "head_dim")),
    (MLATokenToKVPool, MLA, ("kv_lora_rank", "qk_rope_head_dim")),
    (DSATokenToKVPool, MLA | {"index_head_dim": 16}, ("index_head_dim", "kv_lora_rank")),
]


@pytest.mark.parametrize(("kind", "arguments", "sizes"), KINDS, ids=["MHA", "MLA", "DSA"])
def test_what_a_pool_refuses(kind, arguments, sizes):
    counts = [(field, value) for field in ("size", "page_size", *sizes) for value in (0, 2.0, True)]
    for field, value in [*counts, *(("layer_num", value) for value in (-1, 2.0, True))]:
        least = int(field != "layer_num")
        with refuses(ConfigError, field, rf"{kind.__name__}\.{field} must be an int >= {least}"):
            kind(**arguments | {field: value})
    with refuses(ConfigError, "dtype", r"must be float16, .* got torch\.int8"):
        kind(**arguments | {"dtype": torch.int8})
    with pytest.raises(AttentionError, match="no layer -1"):
        kind(**arguments).get_value_buffer(-1)


ROWS, PAGES = lambda: ReqToTokenPool(3, 10, "cpu"), lambda: TokenSlotAllocator(8, 4)
"""Allocators of 3 rows, and of 8 slots in pages of 4."""


@pytest.mark.parametrize(
    ("make", "taken", "call", "value", "text"),
    [
        (ROWS, 0, "alloc", 4, "cannot allocate 4 rows: 3 of 3 are free"),
        (ROWS, 0, "alloc", -1, "cannot allocate -1 rows: 3 of 3 are free"),
        (ROWS, 2, "free", [1, 0], "row 0 belongs to pad rows"),
        (ROWS, 2, "free", [1, 4], "cannot free row 4: expected 1 to 3"),
        (ROWS, 2, "free", [1, 3], "row 3 is already free"),
        (ROWS, 2, "free", [1, 1], "row 1 is already free"),
        (PAGES, 0, "alloc", 12, "cannot allocate 12 slots: 8 of 8 are free"),
        (PAGES, 0, "alloc", 3, "whole pages of 4"),
        (PAGES, 0, "alloc", -4, "cannot allocate -4"),
        (PAGES, 4, "free", [0, 1, 2, 3], "cannot free slot 0"),
        (PAGES, 4, "free", [8, 9, 10, 11], "cannot free slot 8: it is already free"),
        (PAGES, 4, "free", [12, 13, 14, 15], "cannot free slot 12: .* never allocated"),
        (PAGES, 4, "free", [4, 5, 6], "whole pages of 4"),
        (PAGES, 4, "free", [4, 5, 6, 6], "occurs twice"),
        (PAGES, 4, "free", [4, 5, 6, 7] * 2, "occurs twice"),
    ],
)
def test_what_an_allocator_refuses(make, taken, call, value, text):
    allocator = make()
    allocator.alloc(taken)
    left = allocator.available
    with pytest.raises(AttentionError, match=text):
        getattr(allocator, call)(value)
    assert allocator.available == left


@pytest.mark.parametrize(
    ("make", "args", "field"),
    [
        (ReqToTokenPool, (0, 1, "cpu"), "size"),
        (ReqToTokenPool, (1, 0, "cpu"), "max_context_len"),
        (TokenSlotAllocator, (0, 1), "size"),
        (TokenSlotAllocator, (1, 0), "page_size"),
    ],
)
def test_sizes_of_an_allocator(make, args, field):
    with refuses(ConfigError, field, f"{make.__name__}.{field}"):
        make(*args)
