"""Watched memory: which chunks a replay writes, and how their content returns."""

from __future__ import annotations

import pytest
import torch

from graphkit.audit import bits
from graphkit.audit.bits import CHUNK, chunk_sums
from graphkit.audit.foreign.audits.watched_memory import WatchedMemory

SIZES = [0, 1, 7, 8, CHUNK - 8, CHUNK, CHUNK + 1, 2 * CHUNK, 3 * CHUNK + 24, 5 * CHUNK + 3]


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    monkeypatch.setattr(bits, "_BATCH", 2)


def numbers(size):
    return torch.arange(size).mul_(7).remainder_(251).to(torch.uint8)


@pytest.mark.parametrize("size", SIZES)
def test_each_chunk_has_a_sum_and_no_other_chunk_changes_it(size):
    data = numbers(size)
    before = chunk_sums(data)
    assert before.shape == (-(-size // CHUNK),)
    for chunk in range(len(before)):
        last = min((chunk + 1) * CHUNK, size) - 1
        data[last] += 1
        assert (chunk_sums(data) != before).nonzero()[:, 0].tolist() == [chunk]
        data[last] -= 1
    assert torch.equal(chunk_sums(data), before)


def test_the_order_of_words_matters():
    data = numbers(3 * CHUNK)
    swapped = data.clone()
    swapped[:8], swapped[8:16] = data[8:16], data[:8]
    assert (chunk_sums(data) != chunk_sums(swapped)).tolist() == [True, False, False]


@pytest.mark.parametrize("copies", [True, False])
def test_written_chunks_are_found_and_restored(copies):
    parts = [numbers(4 * CHUNK + 40), numbers(CHUNK)]
    start = [part.clone() for part in parts]
    memory = WatchedMemory(parts, [[(0, len(part))] if copies else [] for part in parts])
    parts[0][2 * CHUNK + 5] += 1
    parts[0][4 * CHUNK + 39] += 1
    end = [part.clone() for part in parts]
    assert memory.note_replay(8 * CHUNK) == CHUNK + 40
    assert {(0, 2), (0, 4)} <= set(memory.written)
    memory.rewind()
    assert all(map(torch.equal, parts, start if copies else end))
    parts[0][2 * CHUNK : 3 * CHUNK] = 0
    parts[0][4 * CHUNK :] = 0
    memory.restore()
    assert all(map(torch.equal, parts, end))
    assert memory.changed() == []
    parts[1][9] += 1
    assert memory.changed() == [(1, 0)]


def test_the_first_byte_that_differs_is_named():
    part = numbers(2 * CHUNK)
    memory = WatchedMemory([part], [[]])
    part[CHUNK + 9] += 1
    memory.note_replay(2 * CHUNK)
    expected = memory.contents()
    assert memory.first_difference(expected) is None
    part[CHUNK + 77] += 1
    assert memory.first_difference(expected) == part.data_ptr() + CHUNK + 77


def test_nothing_is_copied_beyond_the_limit():
    part = numbers(3 * CHUNK)
    memory = WatchedMemory([part], [[]])
    part += 1
    assert memory.note_replay(2 * CHUNK) == 3 * CHUNK
    assert memory.written == ()
