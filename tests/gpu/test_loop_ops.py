"""Ends of steps and device loops on CUDA against their torch references, eager and captured."""

from __future__ import annotations

import runpy
from itertools import zip_longest
from pathlib import Path

import pytest
import torch

from graphkit.ops.device_loop import advance_loop
from graphkit.ops.draft_length import choose_body
from graphkit.ops.loop_layout import ENTRY_WORDS, RING_WORDS, EntryWord, LoopEnd
from graphkit.ops.step_state import finish_step
from graphkit.ops.stored_tokens import store_tokens
from sanitized import sanitized

pytestmark = pytest.mark.gpu
CASES = runpy.run_path(str(Path(__file__).parents[1] / "unit" / "ops" / "loop_cases.py"))
finish_case, play = CASES["finish_case"], CASES["play"]
LENGTHS = runpy.run_path(str(Path(__file__).parents[1] / "unit" / "ops" / "length_cases.py"))


def on_device(args):
    return [each.cuda() if torch.is_tensor(each) else each for each in args]


@pytest.mark.parametrize("requests", [*sanitized(0, 1, 7), 300])
@pytest.mark.parametrize("longest", [1, 2, 4, 9])
def test_ends_of_steps(requests, longest):
    for seed in range(9):
        args = finish_case(
            requests, seed=seed, longest=longest, width=longest + seed % 4,
            stops=(1, 3, 16)[seed % 3], dtype=(torch.int32, torch.int64)[seed % 2],
        )  # fmt: skip
        ours = on_device(args)
        report = finish_step(*ours)
        want = finish_step(*args)
        assert report.dtype == want.dtype
        assert torch.equal(report.cpu(), want)
        for got, state in zip(ours[4:7], args[4:7], strict=True):
            assert torch.equal(got.cpu(), state)


@pytest.mark.parametrize("requests", [*sanitized(0, 1, 7), 300])
def test_counts_and_log_probabilities_of_new_tokens(requests):
    for seed in range(9):
        args = CASES["scored_case"](requests, seed)
        ours, want = on_device(args), CASES["scored"](args)
        CASES["assert_scored"](finish_step(*ours), ours, want)


def test_a_graph_finishes_step_after_step():
    args = finish_case(9, seed=5, longest=3)
    ours = on_device(args)
    finish_step(*on_device(args))
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        report = finish_step(*ours)
    for _ in range(5):
        graph.replay()
        assert torch.equal(report.cpu(), finish_step(*args))
        for got, state in zip(ours[4:7], args[4:7], strict=True):
            assert torch.equal(got.cpu(), state)


@pytest.mark.parametrize("largest", [*sanitized(1, 12), 300])
def test_random_loops(largest):
    """The ring is in pinned memory, where the kernels write it."""
    ends = set()
    for seed in range(25 if largest < 300 else 4):
        options = {"launches": 20 if largest < 300 else 6, "largest": largest}
        turns = zip_longest(play(seed, "cuda", **options), play(seed, "cpu", **options))
        for (end, got, want), (_, reference, _) in turns:
            torch.cuda.synchronize()
            assert got == want == reference
            ends.add(end)
    assert ends == set(LoopEnd) or largest != 12


def test_the_host_sees_whole_entries_while_the_device_writes():
    """The sequence number of an entry becomes visible after its report."""
    entries, columns, rows, steps, replays = 2, 4 + 200, 16, 100, 100
    model = CASES["LoopModel"]([rows], columns, entries)
    ops = CASES["LoopTensors"](model, "cuda")
    ops.begin(range(1, rows + 1), [False] * rows, 10**6, 1)
    report = torch.zeros(rows, columns, dtype=torch.int32, device="cuda")
    report[:, 0] = 1

    def write_entries():
        for _ in range(steps):
            report[:, 4:] += 1  # the number of the entry
            advance_loop(report, ops.rows, ops.watched, ops.control, ops.sizes, ops.ring, entries)

    write_entries()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        write_entries()
    for _ in range(replays):
        graph.replay()
    done, seen = torch.cuda.Event(), set()
    done.record()
    stored = ops.ring.numpy()[RING_WORDS:].reshape(entries, -1)
    while not done.query():
        for entry in stored:
            number = int(entry[EntryWord.SEQUENCE])
            tokens = entry[ENTRY_WORDS:].reshape(rows, columns)[:, 4:]
            assert tokens.min() >= number, "the device may have written the next entry already"
            seen.add(number)
    assert len(seen) > 2
    assert stored[:, EntryWord.SEQUENCE].max() == steps * (replays + 1)


def test_draft_lengths():
    for seed in range(300):
        case = LENGTHS["length_case"](seed)
        counts, body = LENGTHS["chosen_body"](case)
        ours = dict(zip(case, on_device(case.values()), strict=True))
        choose_body(**ours)
        torch.testing.assert_close(ours["acceptance"].cpu(), torch.tensor(counts))
        assert body in (None, ours["body"].item()), seed


def test_a_graph_chooses_again_and_again():
    """Counts that a replay writes are those that the next one reads."""
    case = next(
        case for seed in range(99) if (case := LENGTHS["length_case"](seed))["report"] is not None
    )
    ours = dict(zip(case, on_device(case.values()), strict=True))
    choose_body(**dict(zip(case, on_device(case.values()), strict=True)))  # compiles
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        choose_body(**ours)
    for _ in range(5):
        graph.replay()
        choose_body(**case)
        torch.testing.assert_close(ours["acceptance"].cpu(), case["acceptance"])


def test_stored_tokens():
    for seed in range(30):
        want = LENGTHS["stored_case"](seed)
        ours = on_device(want)
        store_tokens(*ours)
        store_tokens(*want)
        for got, expected in zip(ours, want, strict=True):
            is_tensor = torch.is_tensor(got)
            assert torch.equal(got.cpu(), expected) if is_tensor else got == expected
