"""The all-reduce by pushed words on one of three ranks; ``test_interpreted.py`` runs this file."""

from __future__ import annotations

import os
from threading import Timer

import pytest
import torch

from graphkit.ops.kernels.push_all_reduce import BLOCK, launch_push_all_reduce

assert os.environ.get("TRITON_INTERPRET") == "1", "run test_interpreted.py instead"

RANKS, RANK, CAPACITY = 3, 1, 2 * BLOCK


def words_of(x, call):
    """Return what a rank sends of a tensor in a call, from 0."""
    words = x.view(torch.int32).long() & 0xFFFFFFFF
    return words | (call + 1) << 32


def part(memory, call, source):
    """Return where the words of a rank arrive."""
    return memory.view(2, RANKS, CAPACITY)[call % 2, source]


class Ranks:
    """Memory of all ranks, of which one calls."""

    def __init__(self):
        self.memory = [torch.zeros(2 * RANKS * CAPACITY, dtype=torch.int64) for _ in range(RANKS)]
        self.parts = torch.tensor([each.data_ptr() for each in self.memory])
        self.calls = torch.zeros(CAPACITY // BLOCK, dtype=torch.int32)

    def send(self, x, call, source):
        words = words_of(x, call)
        part(self.memory[RANK], call, source)[: len(words)] = words

    def all_reduce(self, x):
        return launch_push_all_reduce(x, self.calls, self.parts, RANK, CAPACITY)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 300, BLOCK, BLOCK + 6])
def test_calls_use_two_parts_in_turn(dtype, size):
    ranks = Ranks()
    for call in range(4):
        xs = torch.randint(-9, 10, (RANKS, size)).to(dtype)  # their sums are exact
        for source in (0, 2):
            ranks.send(xs[source], call, source)
        out = ranks.all_reduce(xs[RANK])
        assert torch.equal(out, xs.sum(0))
        for peer in (0, 2):
            sent = words_of(xs[RANK], call)
            assert torch.equal(part(ranks.memory[peer], call, RANK)[: len(sent)], sent)
    blocks = -(-size * xs.itemsize // 4 // BLOCK)
    assert ranks.calls.tolist() == [4 * (block < blocks) for block in range(CAPACITY // BLOCK)]


def test_a_call_waits_for_the_words_of_all():
    ranks, xs = Ranks(), torch.randn(RANKS, 8)
    ranks.send(xs[0], 0, 0)
    ranks.send(xs[2].flip(0), -1, 2)  # of an earlier call
    late = Timer(0.1, ranks.send, [xs[2], 0, 2])
    late.start()
    assert torch.equal(ranks.all_reduce(xs[RANK]), xs[0] + xs[1] + xs[2])
    late.join()


def test_calls_of_different_sizes():
    """Words that a smaller call leaves alone keep the number of their own calls."""
    ranks, counts = Ranks(), [0, 0]
    for size in (BLOCK + 4, 4, 4, BLOCK + 4, BLOCK + 4):
        xs = torch.randn(RANKS, size)
        for block in range(1 + (size > BLOCK)):
            cut = slice(block * BLOCK, (block + 1) * BLOCK)
            for source in (0, 2):
                words = words_of(xs[source][cut], counts[block])
                part(ranks.memory[RANK], counts[block], source)[cut][: len(words)] = words
            counts[block] += 1
        assert torch.equal(ranks.all_reduce(xs[RANK]), xs[0] + xs[1] + xs[2])
    assert ranks.calls.tolist() == counts
