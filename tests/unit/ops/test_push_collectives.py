"""Collectives by pushed words on one of three ranks, on the CPU by ``gluon_interpreter``."""

from __future__ import annotations

import time
from ctypes import c_int64
from functools import reduce
from threading import Timer

import pytest
import torch
import triton
from torch.nn.functional import pad

from gluon_interpreter import Pointer, block, run_kernel
from graphkit.ops.decoder import add_rms_norm
from graphkit.ops.kernels.push_collectives import (
    SPAN,
    PushMemory,
    launch_push_add_rms_norm,
    launch_push_all_gather,
    launch_push_all_reduce,
)

RANKS, RANK, CAPACITY = 3, 1, 4 * SPAN
PEERS = (0, 2)


def places_of(pointer, is_word):
    """Return the places of pairs of words of which the first is one, and which these are."""
    is_pair = is_word[::2].repeat_interleave(2)
    return pointer.places[is_pair].long(), is_pair


def memory_of(parts, rank):
    """Return what ``_memory_of`` does, from an address."""
    memory = (c_int64 * (2 * RANKS * CAPACITY)).from_address(int(parts.memory[rank]))
    return Pointer(torch.frombuffer(memory, dtype=torch.int64))


def push(target, word, stamp, is_word):
    """Do what ``_push`` does by PTX."""
    places, is_pair = places_of(target, is_word)
    words = (stamp.long() << 32) | (word.long() & 0xFFFFFFFF)
    target.memory[places] = words[is_pair]


def received(source, stamp, is_word):
    """Return what ``_received`` does by PTX."""
    places, is_pair = places_of(source, is_word)
    deadline = time.monotonic() + 30
    while (source.memory[places] >> 32 != stamp[is_pair]).any():
        assert time.monotonic() < deadline, "words never arrive"
        time.sleep(0.001)
    words = torch.zeros_like(stamp)
    words[is_pair] = source.memory[places].int()
    return block(words)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    def run(kernel, *args, grid, **options):
        by_ptx = {"_push": push, "_received": received, "_wait_for_threads": lambda: None}
        run_kernel(kernel, grid, args, {"_memory_of": memory_of, **by_ptx})

    monkeypatch.setattr(triton.JITFunction, "run", run)


def words_of(x, call):
    """Return what a rank sends of a tensor in a call, from 0."""
    words = x.contiguous().view(-1).view(torch.int32).long() & 0xFFFFFFFF
    words = pad(words, (0, len(words) % 2))  # words are sent in pairs
    return words | (call | 1) << 32


def part(memory, call, source):
    """Return where the words of a rank arrive."""
    return memory.view(2, RANKS, CAPACITY)[call % 2, source]


class Ranks:
    """Memory of all ranks, of which one calls."""

    def __init__(self):
        self.memory = [torch.zeros(2 * RANKS * CAPACITY, dtype=torch.int64) for _ in range(RANKS)]
        self.own = PushMemory(
            calls=torch.zeros(CAPACITY // SPAN, dtype=torch.int32),
            parts=torch.tensor([each.data_ptr() for each in self.memory]),
            rank=RANK,
            capacity=CAPACITY,
        )

    def send(self, x, call, source, begin=0):
        words = words_of(x, call)
        part(self.memory[RANK], call, source)[begin : begin + len(words)] = words

    def sent(self, call, peer, begin, size):
        return part(self.memory[peer], call, RANK)[begin : begin + size]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 300, SPAN, SPAN + 6])
def test_calls_use_two_parts_in_turn(dtype, size):
    ranks = Ranks()
    for call in range(4):
        xs = torch.randint(-9, 10, (RANKS, size)).to(dtype)  # their sums are exact
        for source in PEERS:
            ranks.send(xs[source], call, source)
        out = launch_push_all_reduce(xs[RANK], ranks.own)
        assert torch.equal(out, xs.sum(0))
        expected = words_of(xs[RANK], call)
        for peer in PEERS:
            assert torch.equal(ranks.sent(call, peer, 0, len(expected)), expected)
    spans = -(-size * xs.itemsize // 4 // SPAN)
    assert ranks.own.calls.tolist() == [4 * (span < spans) for span in range(CAPACITY // SPAN)]


def test_a_call_waits_for_the_words_of_all():
    ranks, xs = Ranks(), torch.randn(RANKS, 8)
    ranks.send(xs[0], 0, 0)
    ranks.send(xs[2].flip(0), -1, 2)  # of an earlier call
    late = Timer(0.1, ranks.send, [xs[2], 0, 2])
    late.start()
    assert torch.equal(launch_push_all_reduce(xs[RANK], ranks.own), xs[0] + xs[1] + xs[2])
    late.join()


def test_a_call_waits_in_memory_that_no_call_wrote_when_the_count_wraps():
    """Int32 counts the calls of a span up to 2**31 - 1, and on from -2**31."""
    for call in (2**31 - 1, -(2**31), -2, -1, 0):
        ranks, xs = Ranks(), torch.randn(RANKS, 8)
        ranks.own.calls.fill_(call)
        ranks.send(xs[0], call, 0)
        late = Timer(0.1, ranks.send, [xs[2], call, 2])
        late.start()
        assert torch.equal(launch_push_all_reduce(xs[RANK], ranks.own), xs[0] + xs[1] + xs[2])
        late.join()
    assert ranks.own.calls[0] == 1


def test_calls_follow_each_other_when_the_count_wraps():
    ranks = Ranks()
    ranks.own.calls.fill_(-3)
    for call in range(-3, 3):
        xs = torch.randn(RANKS, 8)
        for source in PEERS:
            ranks.send(xs[source], call, source)
        out = launch_push_all_gather(xs[RANK : RANK + 1].view(1, 8), ranks.own)
        assert torch.equal(out, xs.view(1, -1))
        assert torch.equal(ranks.sent(call, 0, 0, 8), words_of(xs[RANK], call))
    assert ranks.own.calls[0] == 3


def test_calls_of_different_sizes():
    """Words that a smaller call leaves alone keep the number of their own calls."""
    ranks, counts = Ranks(), [0, 0]
    for size in (SPAN + 4, 4, 4, SPAN + 4, SPAN + 4):
        xs = torch.randn(RANKS, size)
        for span in range(1 + (size > SPAN)):
            cut = slice(span * SPAN, (span + 1) * SPAN)
            for source in PEERS:
                ranks.send(xs[source][cut], counts[span], source, begin=span * SPAN)
            counts[span] += 1
        assert torch.equal(launch_push_all_reduce(xs[RANK], ranks.own), xs[0] + xs[1] + xs[2])
    assert ranks.own.calls.tolist() == [*counts, 0, 0]


def in_order(summands):
    """Add up the first dimension in order, since sums are rounded."""
    return reduce(torch.add, summands)


@pytest.mark.parametrize("summands", [0, 1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "words"), [(3, 6), (2, SPAN), (2, SPAN + 30)])
def test_sums_are_added_and_normalised_in_the_same_kernel(summands, dtype, rows, words):
    """Rows begin at spans of their own. One call of another kind advances the first span."""
    ranks, width = Ranks(), words * 4 // dtype.itemsize
    single = torch.ones(RANKS, 2, dtype=dtype)
    for source in PEERS:
        ranks.send(single[source], 0, source)
    launch_push_all_reduce(single[RANK], ranks.own)
    xs = torch.randn(RANKS, rows, width).to(dtype)
    residual, weight = torch.randn(rows, width).to(dtype), torch.rand(width).to(dtype)
    own = xs[RANK]
    if summands:
        own = torch.randn(summands, rows, width)
        xs[RANK] = in_order(own).to(dtype)
    spans = -(-words // SPAN)
    for source in PEERS:
        for row in range(rows):
            cut = xs[source][row].view(torch.int32)
            for span in range(spans):
                piece = cut[span * SPAN : (span + 1) * SPAN]
                place = row * spans + span
                ranks.send(piece, int(ranks.own.calls[place]), source, begin=place * SPAN)
    out, total = launch_push_add_rms_norm(own, residual, weight, 1e-5, ranks.own)
    summed = in_order(xs.float()).to(dtype)
    expected, expected_total = add_rms_norm(summed, residual, weight, 1e-5)
    assert torch.equal(total, expected_total)
    rtol = max(2 * torch.finfo(dtype).eps, 1e-6)  # the mean is a sum in another order
    torch.testing.assert_close(out, expected, rtol=rtol, atol=0)
    used = rows * spans
    assert ranks.own.calls.tolist() == [2] + [1] * (used - 1) + [0] * (4 - used)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
@pytest.mark.parametrize(("rows", "words"), [(1, 2), (3, 50), (2, SPAN + 100)])
def test_columns_are_gathered_side_by_side(dtype, rows, words):
    ranks = Ranks()
    for call in range(2):
        xs = torch.randint(-9, 10, (RANKS, rows, words * 4 // dtype.itemsize)).to(dtype)
        for source in PEERS:
            ranks.send(xs[source], call, source)
        out = launch_push_all_gather(xs[RANK], ranks.own)
        assert torch.equal(out, torch.cat(tuple(xs), 1))


def test_empty_tensors_are_no_calls():
    ranks, empty = Ranks(), torch.empty(0, 8)
    weight = torch.ones(8)
    assert launch_push_all_reduce(empty, ranks.own).shape == (0, 8)
    assert launch_push_all_gather(empty, ranks.own).shape == (0, 24)
    out, total = launch_push_add_rms_norm(empty, empty, weight, 1e-5, ranks.own)
    assert out.shape == total.shape == (0, 8)
    assert not ranks.own.calls.any()
