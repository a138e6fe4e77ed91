"""begin_loop and advance_loop: rows, control and ring of device loops, against plain Python."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

from graphkit.errors import InputError
from graphkit.ops.device_loop import advance_loop, begin_loop, end_signals
from graphkit.ops.loop_layout import (
    ENTRY_WORDS,
    RING_WORDS,
    Control,
    EntryWord,
    LoopEnd,
    Report,
    RequestEnd,
    RingWord,
)

LoopModel, LoopTensors, MANY, play = map(
    runpy.run_path(str(Path(__file__).with_name("loop_cases.py"))).get,
    ("LoopModel", "LoopTensors", "MANY", "play"),
)
COLUMNS = Report.TOKENS + 2
RUNS, ENDS, HAD_ENDED = [1, 1, 1, 0, 9, -1], [1, 1, 1, 1, 9, -1], [0, 0, 0, 0, -1, -1]
"""Rows of reports, with 1 for the row of the request."""


def test_random_loops():
    ends = set()
    for seed in range(25):
        for end, got, want in play(seed, "cpu"):
            assert got == want
            ends.add(end)
    assert ends == set(LoopEnd), "every end occurs"


@pytest.fixture
def loop():
    """A loop at sizes 1, 2, 4 and a ring of 3 entries, and its report of given lines."""
    ops = LoopTensors(LoopModel([1, 2, 4], COLUMNS, 3), "cpu")

    def advance(*lines):
        size = int(ops.sizes[ops.control[Control.BODY]])
        rows = [row * line[Report.ROW] for row, line in zip(ops.rows.tolist(), lines, strict=False)]
        lines = [[row, *line[1:]] for row, line in zip(rows, lines, strict=False)]
        ops.advance((lines + [HAD_ENDED] * size)[:size])
        return ops.control[Control.AGAIN] == 1

    ops.step = advance
    return ops


def entry_of(loop, number):
    words = loop.ring[RING_WORDS:].view(3, -1)[number % 3]
    return {word.name: words[word].item() for word in EntryWord}


def test_remaining_requests_keep_their_order_and_run_at_the_smallest_size(loop):
    loop.begin([7, 3, 9, 5], [True, False, False, True], 50, 1)
    assert loop.control.tolist() == [1, 2, 50, 0, 1]
    assert loop.step(RUNS, HAD_ENDED, RUNS, RUNS)
    assert loop.rows.tolist() == [7, 9, 5, 0]
    assert loop.watched.tolist() == [True, False, True, False]
    assert loop.control[Control.BODY] == 2
    assert loop.step(RUNS, ENDS, RUNS)
    assert loop.rows.tolist() == [7, 5, 0, 0]
    assert loop.watched.tolist() == [True, True, False, False]
    assert loop.control[Control.BODY] == 1
    assert not loop.step(HAD_ENDED, HAD_ENDED)
    assert loop.rows.tolist() == [0] * 4
    assert loop.control[Control.BODY] == 0


def test_a_watched_row_that_had_ended_before_ends_nothing(loop):
    loop.begin([7, 3], [True, False], 50, 1)
    assert loop.step(HAD_ENDED, RUNS)
    assert entry_of(loop, 0)["LOOP_END"] == LoopEnd.RUNNING


@pytest.mark.parametrize("first", range(6))
def test_the_first_reason_in_this_order_is_the_end(loop, first):
    """The reasons from ``first`` on hold, those before it do not."""
    order = (
        LoopEnd.IDLE, LoopEnd.REQUEST, LoopEnd.STOPPED, LoopEnd.STEPS, LoopEnd.RING_FULL,
        LoopEnd.RUNNING,
    )  # fmt: skip
    holds = set(order[first:])
    loop.begin([1, 2], [LoopEnd.REQUEST in holds, False], 1 if LoopEnd.STEPS in holds else 2, 5)
    loop.write(RingWord.STOP, 5 if LoopEnd.STOPPED in holds else 4)
    loop.write(RingWord.READ, -2 if LoopEnd.RING_FULL in holds else -1)
    other = ENDS if LoopEnd.IDLE in holds else RUNS
    is_running = loop.step(ENDS, other)
    assert is_running == (order[first] is LoopEnd.RUNNING)
    assert entry_of(loop, 0)["LOOP_END"] == order[first]


@pytest.mark.parametrize("written", [0, MANY])
def test_entries_wrap_around(written):
    """Also where the counters pass the limit of int32."""
    ops = LoopTensors(LoopModel([2], COLUMNS, 3, written), "cpu")
    ops.begin([4, 6], [False, False], 50, 1)
    for number in range(written, written + 7):
        ops.write(RingWord.READ, number)
        ops.advance([[4, 1, 1, 0, number - written, -1], [6, 1, 1, 0, 1, -1]])
        entry = ops.ring[RING_WORDS:].view(3, -1)[number % 3]
        assert entry[EntryWord.SEQUENCE] == number + 1
        assert entry[ENTRY_WORDS + Report.TOKENS] == number - written
    kept = ops.ring[RING_WORDS:].view(3, -1)[:, EntryWord.SEQUENCE]
    assert sorted(kept.tolist()) == [written + 5, written + 6, written + 7]


def test_a_smaller_step_leaves_the_rest_of_its_entry(loop):
    loop.begin([1, 2, 3], [False] * 3, 50, 1)
    loop.step(RUNS, RUNS, RUNS)
    for _ in range(3):
        loop.step(RUNS, ENDS, ENDS)
    assert entry_of(loop, 3) == {
        "SEQUENCE": 4,
        "BATCH_SIZE": 1,
        "LOOP_END": 5,
        "LAUNCH": 1,
        "LENGTH": 0,
    }
    lines = loop.ring[RING_WORDS:].view(3, -1)[0][ENTRY_WORDS:].view(4, COLUMNS)
    assert lines[0].tolist() == RUNS
    assert lines[1].tolist() == [2, *RUNS[1:]]


def test_ends_of_requests_are_reasons_alike(loop):
    loop.begin([1, 2], [True, True], 50, 1)
    loop.step([1, 1, 1, RequestEnd.LENGTH, 9, -1], RUNS)
    assert entry_of(loop, 0)["LOOP_END"] == LoopEnd.REQUEST


BEGIN = {
    "req_pool_indices": torch.zeros(4).long(), "is_watched": torch.zeros(4).bool(),
    "max_steps": torch.ones(1).long(), "launch": torch.ones(1).long(),
    "loop_rows": torch.zeros(4).long(), "loop_watched": torch.zeros(4).bool(),
    "control": torch.zeros(5).long(), "batch_sizes": torch.tensor([2, 4]).int(),
}  # fmt: skip
ADVANCE = {
    "report": torch.zeros(2, COLUMNS).int(),
    **{name: BEGIN[name] for name in ("loop_rows", "loop_watched", "control", "batch_sizes")},
    "ring": torch.zeros(RING_WORDS + 3 * (ENTRY_WORDS + 4 * COLUMNS)).long(), "entries": 3,
}  # fmt: skip
SIGNALS = {name: ADVANCE[name] for name in ("control", "ring", "entries")}


@pytest.mark.parametrize(
    ("op", "arguments", "change", "message"),
    [
        (begin_loop, BEGIN, {"is_watched": torch.zeros(3).bool()}, r"is_watched is \[3\] bool"),
        (begin_loop, BEGIN, {"max_steps": torch.ones(1).int()}, r"max_steps is \[1\] int32"),
        (begin_loop, BEGIN, {"control": torch.zeros(4).long()}, r"control is \[4\] int64"),
        (begin_loop, BEGIN, {"loop_rows": torch.zeros(8).long()[::2]}, "loop_rows has strides"),
        (advance_loop, ADVANCE, {"report": torch.zeros(2, 6)}, r"report is \[2, 6\] float32"),
        (advance_loop, ADVANCE, {"ring": torch.zeros(16).long()},
         r"ring is \[16\] int64 on cpu, expected .* = \[136\] int64\.$"),
        (advance_loop, ADVANCE, {"ring": torch.zeros(272).long()[::2]}, "ring has strides"),
        (advance_loop, ADVANCE, {"ring": torch.zeros(136).int()}, r"ring is \[136\] int32"),
        (advance_loop, ADVANCE, {"entries": 0}, "entries is 0, expected at least 1"),
        (advance_loop, ADVANCE, {"signals": torch.zeros(2)}, r"signals is \[2\] float32"),
        (end_signals, SIGNALS, {"ring": torch.zeros(8).long()}, r"ring is \[8\] int64"),
        (end_signals, SIGNALS, {"control": torch.zeros(4).long()}, r"control is \[4\] int64"),
    ],
)  # fmt: skip
def test_refusals(op, arguments, change, message):
    with pytest.raises(InputError, match=message) as caught:
        op(**arguments | change)
    assert caught.value.field == next(iter(change))


@pytest.mark.parametrize(
    ("op", "arguments"), [(begin_loop, BEGIN), (advance_loop, ADVANCE), (end_signals, SIGNALS)]
)
def test_tracers_see_the_op(op, arguments):
    overload = getattr(torch.ops.graphkit, op.__name__).default
    copies = [each.clone() if torch.is_tensor(each) else each for each in arguments.values()]
    torch.library.opcheck(overload, copies, test_utils=("test_schema", "test_faketensor"))
