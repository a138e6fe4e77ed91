"""The op that writes rows into a KV cache, on every device, and what it refuses."""

from __future__ import annotations

import pytest
import torch

from graphkit.errors import AttentionError
from graphkit.ops.kv_cache import store_kv
from op_devices import CPU, CUDA, INTERPRETER, by

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@by(CPU, INTERPRETER, CUDA)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [1, 3, 40])
def test_rows_are_written_into_their_slots_and_no_other(run, dtype, heads):
    torch.manual_seed(heads)
    # The interpreter cuts bfloat16 off where hardware rounds: give it numbers that fit.
    fused = torch.randn(5, 3 * heads, 80).bfloat16().float()
    rows = fused[:, heads : 2 * heads], fused[:, 2 * heads :]
    loc = torch.tensor([3, 0, 9, 4, 7])
    caches = [torch.zeros(10, heads, 80, dtype=dtype) for _ in "kv"]
    run(store_kv, *caches, loc, *rows)
    for cache, new in zip(caches, rows, strict=True):
        assert torch.equal(cache[loc], new.to(dtype))
        assert cache[[1, 2, 5, 6, 8]].eq(0).all()


@by(INTERPRETER, CUDA)
def test_rows_outside_the_cache_are_dropped(run):
    caches = [torch.zeros(4, 2, 16) for _ in "kv"]
    rows = torch.ones(3, 2, 16)
    run(store_kv, *caches, torch.tensor([-1, 4, 2]), rows, rows)
    assert [int(cache.sum()) for cache in caches] == [32, 32]


@by(CPU, INTERPRETER)  # on CUDA, test_latent_pools stores into two parts
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
def test_two_parts_of_a_buffer(run, dtype):
    rows = [torch.randint(0, 256, (3, 1, size)).to(dtype) for size in (80, 3)]
    loc, buffer = torch.tensor([3, 0, 4]), torch.ones(6, 1, 83, dtype=dtype)
    run(store_kv, *buffer.split([80, 3], -1), loc, *rows)
    assert torch.equal(buffer[loc], torch.cat(rows, -1))
    assert buffer[[1, 2, 5]].eq(1).all()


@by(CPU, INTERPRETER, CUDA)
def test_pads_in_any_order_and_no_rows_at_all(run):
    caches, rows = ([torch.randn(size, 2, 4) for _ in "kv"] for size in (6, 3))
    run(store_kv, *caches, torch.zeros(3, dtype=torch.int64), *rows)
    assert any(torch.equal(caches[0][0], row) for row in rows[0])
    run(store_kv, *caches, torch.zeros(0, dtype=torch.int64), rows[0][:0], rows[1][:0])


def test_refusals():
    keys, values = (torch.zeros(6, 2, 4) for _ in "kv")
    (key, value), loc = torch.randn(2, 3, 2, 4), torch.tensor([5, 0, 2])
    for args, text in (
        (
            (keys, values[1:], loc, key, value),
            r"value_cache is \[5, 2, 4\] .* = \[6, 2, E\]",
        ),
        ((*(each.mT.contiguous().mT for each in (keys, values)), loc, key, value), "contiguous"),
        ((keys, values, loc.int(), key, value), r"loc_T is \[3\] int32"),
        ((keys, values, loc, key[:2], value), r"key_TMD is \[2, 2, 4\]"),
        ((keys, values, loc, key, value.long()), r"value_TMD is \[3, 2, 4\] int64"),
    ):
        with pytest.raises(AttentionError, match=text):
            store_kv(*args)
    with pytest.raises(IndexError):
        store_kv(keys, values, loc + 1, key, value)
