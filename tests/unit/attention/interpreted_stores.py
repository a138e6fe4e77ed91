"""The launchers that write a KV cache against their references. ``test_interpreted`` runs them."""

from __future__ import annotations

import os

import pytest
import torch

from graphkit.engine.kv import DSATokenToKVPool, MHATokenToKVPool, MLATokenToKVPool
from graphkit.ops.kv_cache import buffer_table, move_kv, store_kv
from graphkit.ops.registration import OPS

assert os.environ.get("TRITON_INTERPRET") == "1", "run ops/test_interpreted.py instead"


def launch(op, *args, **options):
    op = OPS[op.__name__]
    return op.launch(op.arguments(*args), **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("heads", [1, 3, 40])
def test_store(dtype, heads):
    torch.manual_seed(heads)
    # The interpreter cuts bfloat16 off where hardware rounds: give it numbers that fit.
    fused = torch.randn(5, 3 * heads, 80).bfloat16().float()
    key, value = fused[:, heads : 2 * heads], fused[:, 2 * heads :]
    loc = torch.tensor([3, 0, 9, 4, 7])
    caches = [torch.zeros(10, heads, 80, dtype=dtype) for _ in range(4)]
    launch(store_kv, *caches[:2], loc, key, value)
    store_kv(*caches[2:], loc, key, value)
    assert torch.equal(caches[0], caches[2])
    assert torch.equal(caches[1], caches[3])


def test_store_drops_rows_outside_the_cache():
    caches = [torch.zeros(4, 2, 16) for _ in "kv"]
    rows = torch.ones(3, 2, 16)
    launch(store_kv, *caches, torch.tensor([-1, 4, 2]), rows, rows)
    assert [int(cache.sum()) for cache in caches] == [32, 32]
    launch(store_kv, *caches, torch.zeros(0, dtype=torch.int64), rows[:0], rows[:0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
def test_store_into_two_parts_of_a_buffer(dtype):
    torch.manual_seed(0)
    rows = [torch.randint(0, 256, (5, 1, size)).to(dtype) for size in (80, 3)]
    loc = torch.tensor([3, 0, -1, 4, 9])
    buffers = [torch.ones(6, 1, 83, dtype=dtype) for _ in range(2)]
    launch(store_kv, *buffers[0].split([80, 3], -1), loc, *rows)
    live = [0, 1, 3]
    store_kv(*buffers[1].split([80, 3], -1), loc[live], rows[0][live], rows[1][live])
    assert torch.equal(*buffers)


POOLS = [
    MHATokenToKVPool(9, 2, torch.bfloat16, 2, 80, 3, "cpu"),
    MHATokenToKVPool(9, 2, torch.float32, 3, 500, 1, "cpu"),
    MHATokenToKVPool(9, 1, torch.float16, 1, 3, 2, "cpu"),
    MLATokenToKVPool(9, 2, torch.float32, 512, 64, 2, "cpu"),
    DSATokenToKVPool(9, 2, torch.bfloat16, 20, 4, 2, "cpu", 7),
    DSATokenToKVPool(9, 2, torch.bfloat16, 20, 4, 2, "cpu", 128),
]


@pytest.mark.parametrize("pool", POOLS, ids=lambda pool: type(pool).__name__[:3])
@pytest.mark.parametrize(
    ("target", "source"),
    [
        ([2, 3, 4], [1, 2, 3]),
        ([1, 2, 3], [2, 3, 4]),
        ([5, 1, 9], [1, 5, 5]),
        ([7, 0, 0, 0, 8], [8, 0, 0, 0, 7]),
        ([[3, 0], [4, 0]], [[1, 0], [3, 0]]),
        ([], []),
    ],
    ids=str,
)
def test_move(pool, target, source):
    torch.manual_seed(0)
    target, source = (torch.tensor(loc, dtype=torch.int64) for loc in (target, source))
    for tensor in pool.tensors().values():
        tensor.copy_(torch.randint(0, 256, tensor.shape))
    buffers = list(pool.tensors().values())
    expected = [buffer.clone() for buffer in buffers]
    move_kv(expected, buffer_table(expected), target, source)
    launch(move_kv, buffers, buffer_table(buffers), target, source)
    for got, want in zip(buffers, expected, strict=True):
        assert torch.equal(got, want)


def test_move_of_slots_outside_touches_nothing():
    buffers = [torch.arange(24.0).view(4, 6), torch.arange(8.0).view(4, 2)]
    before = [buffer.clone() for buffer in buffers]
    loc = torch.tensor([4, -1, 1, 2, 10**12])
    launch(move_kv, buffers, buffer_table(buffers), loc, torch.tensor([1, 2, -1, 4, 0]))
    assert all(map(torch.equal, buffers, before))
    launch(move_kv, buffers, buffer_table(buffers), loc, torch.tensor([1, 2, 3, 3, 0]))
    for got, old in zip(buffers, before, strict=True):
        assert torch.equal(got, old[[0, 3, 3, 3]])
