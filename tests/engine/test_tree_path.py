"""``finalize_accepted_tree_path`` against moving rows one by one, over every kind of pool."""

from __future__ import annotations

import random

import pytest
import torch

from graphkit.engine import finalize_accepted_tree_path
from graphkit.engine.kv import DSATokenToKVPool, MHATokenToKVPool, MLATokenToKVPool

SLOTS, HIDDEN = 64, 6
POOLS = {
    "MHA": lambda layers, device: MHATokenToKVPool(SLOTS, 1, torch.float16, 2, 4, layers, device),
    "MLA": lambda layers, device: MLATokenToKVPool(SLOTS, 1, torch.float32, 6, 4, layers, device),
    "DSA": lambda layers, device: DSATokenToKVPool(
        SLOTS, 1, torch.bfloat16, 6, 4, layers, device, 8
    ),
}


@pytest.fixture(params=POOLS)
def make_pool(request, device):
    """``make_pool(layers)``: a pool of random contents."""

    def make(layers):
        pool = POOLS[request.param](layers, device)
        for tensor in pool.tensors().values():
            tensor.copy_(torch.randint(0, 99, tensor.shape, device=device))
        return pool

    return make


def random_step(batch_size, width, columns, seed):
    """Return random slots, and a path of random length from each request's root."""
    generator = random.Random(seed)
    slots = generator.sample(range(1, SLOTS + 1), batch_size * width)
    paths = []
    for request in range(batch_size):
        drafts = generator.randint(0, min(columns, width) - 1)
        nodes = [0, *sorted(generator.sample(range(1, width), drafts))]
        flat = [request * width + node for node in nodes]
        paths.append(flat + [-1] * (columns - len(flat)))
    return slots, paths


def one_by_one(rows, slots, paths, width):
    """Return rows by slot, each accepted node's row moved to the front of its request's slots."""
    moved = rows.clone()
    for request, path in enumerate(paths):
        for column, node in enumerate(node for node in path if node >= 0):
            moved[slots[request * width + column]] = rows[slots[node]]
    return moved


@pytest.mark.parametrize("layers", [0, 1, 3])
@pytest.mark.parametrize(
    ("batch_size", "width", "columns"),
    [(1, 2, 2), (1, 8, 4), (3, 8, 4), (7, 9, 3), (5, 4, 4), (2, 1, 1), (3, 5, 1)],
)
def test_accepted_rows_move_to_the_front(make_pool, device, batch_size, width, columns, layers):
    for seed in range(4):
        slots, paths = random_step(batch_size, width, columns, seed)
        pool = make_pool(layers)
        before = {name: tensor.clone() for name, tensor in pool.tensors().items()}
        predict = torch.randint(0, 99, (batch_size * width,), device=device)
        hidden = torch.randn(batch_size * width, HIDDEN, device=device)
        new_predict, new_hidden = finalize_accepted_tree_path(
            pool,
            torch.tensor(paths, dtype=torch.int32, device=device),
            torch.tensor(slots, device=device),
            predict,
            hidden,
        )
        for name, tensor in pool.tensors().items():
            expected = one_by_one(before[name], slots, paths, width)
            assert torch.equal(tensor[1:], expected[1:]), f"{name}: all but the reserved slot 0"
        accepted = [[node for node in path if node >= 0] for path in paths]
        for request, path in enumerate(accepted):
            front = slice(request * width, request * width + len(path))
            assert torch.equal(new_predict[front], predict[path])
            assert torch.equal(new_hidden[front], hidden[path])


def test_an_idle_batch_moves_nothing(make_pool, device):
    pool = make_pool(1)
    before = {name: tensor.clone() for name, tensor in pool.tensors().items()}
    empty = torch.empty(0, dtype=torch.int64, device=device)
    paths = torch.empty(0, 4, dtype=torch.int32, device=device)
    predict, hidden = finalize_accepted_tree_path(
        pool, paths, empty, empty, torch.empty(0, HIDDEN, device=device)
    )
    assert (predict.shape, hidden.shape) == ((0,), (0, HIDDEN))
    for name, tensor in pool.tensors().items():
        assert torch.equal(tensor, before[name])
