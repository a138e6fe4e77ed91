"""begin_loop, advance_loop and end_signals on every device, against plain Python."""

from __future__ import annotations

from itertools import zip_longest
from random import Random

import pytest
import torch
import triton
import triton.language as tl

from graphkit.errors import InputError
from graphkit.ops.device_loop import advance_loop, begin_loop, end_signals
from graphkit.ops.kernels import device_loop as kernels
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
from op_devices import CPU, INTERPRETER, by
from sanitized import sanitized

MANY = 2**31 - 3
"""Counters of a process that has run for days: they pass the limit of int32."""
COLUMNS = Report.TOKENS + 2
RUNS, ENDS, HAD_ENDED = [1, 1, 1, 0, 0, 9, -1], [1, 1, 1, 1, 0, 9, -1], [0, 0, 0, 0, 0, -1, -1]
"""Rows of reports, with 1 for the row of the request."""

TIMES = [1500, 2500]
"""Words of plain decoding and of the steps."""


class LoopModel:
    """The control of device loops, over lists."""

    def __init__(self, sizes, columns, entries, written=0):
        self.sizes, self.columns, self.entries = sizes, columns, entries
        self.entry_words = ENTRY_WORDS + sizes[-1] * columns
        self.ring = [0] * (RING_WORDS + entries * self.entry_words)
        self.rows, self.watched = [], []
        self.again = self.body = self.steps_left = self.launch = 0
        self.written = self.ring[RingWord.READ] = written

    def begin(self, rows, watched, max_steps, launch):
        self.rows, self.watched, self.launch = list(rows), list(watched), launch
        self.again, self.steps_left = 1, max_steps
        self._choose_body()

    def advance(self, report):
        ended = [line[Report.END] != RequestEnd.RUNNING for line in report]
        pairs = list(zip(self.rows, self.watched, ended, report, strict=False))
        going = [(row, on) for row, on, is_end, line in pairs if line[Report.ROW] and not is_end]
        self.rows, self.watched = [row for row, _ in going], [on for _, on in going]
        self.steps_left -= 1
        self.written += 1
        end = LoopEnd.RUNNING
        if self.written - self.ring[RingWord.READ] >= self.entries:
            end = LoopEnd.RING_FULL
        if self.steps_left <= 0:
            end = LoopEnd.STEPS
        if self.ring[RingWord.STOP] >= self.launch:
            end = LoopEnd.STOPPED
        if any(on and is_end for _, on, is_end, _ in pairs):
            end = LoopEnd.REQUEST
        if not self.rows:
            end = LoopEnd.IDLE
        self.again = int(end is LoopEnd.RUNNING)
        self._choose_body()
        words = [self.written, len(report), end, self.launch, 0, *TIMES]
        words += [0] * (ENTRY_WORDS - len(words))
        words += [word for line in report for word in line]
        at = RING_WORDS + (self.written - 1) % self.entries * self.entry_words
        self.ring[at : at + len(words)] = words
        return end

    @property
    def size(self):
        """Size of the next step."""
        return self.sizes[self.body]

    def state(self):
        most = self.sizes[-1]
        pads = most - len(self.rows)
        return {
            "rows": self.rows + [0] * pads,
            "watched": self.watched + [False] * pads,
            "control": [self.again, self.body, self.steps_left, self.written, self.launch],
            "ring": self.ring,
        }

    def _choose_body(self):
        self.body = next(i for i, size in enumerate(self.sizes) if size >= len(self.rows))


class LoopTensors:
    """The tensors of a device loop, with the ops."""

    def __init__(self, model, device="cpu", run=CPU):
        def words(values, dtype=torch.int64):
            return torch.tensor(values, dtype=dtype, device=device)

        self.run, self.words, self.most, self.entries = run, words, model.sizes[-1], model.entries
        self.rows, self.watched = words([0] * self.most), words([0] * self.most, torch.bool)
        self.control, self.sizes = words([0] * len(Control)), words(model.sizes, torch.int32)
        self.control[Control.WRITTEN] = model.written
        self.ledger = torch.tensor([0, 1.5, 2.5, 0], dtype=torch.float64, device=device)
        self.ring = torch.tensor(model.ring)
        if self.rows.is_cuda:
            self.ring = self.ring.pin_memory()

    def begin(self, rows, watched, max_steps, launch):
        pads = [0] * (self.most - len(rows))
        self.run(
            begin_loop, self.words([*rows, *pads]), self.words([*watched, *pads], torch.bool),
            self.words([max_steps]), self.words([launch]),
            self.rows, self.watched, self.control, self.sizes,
        )  # fmt: skip

    def advance(self, report, *, is_signalled=False):
        signals = None
        if is_signalled:
            signals = self.run(end_signals, self.control, self.ring, self.entries)
        self.run(
            advance_loop, self.words(report, torch.int32), self.rows, self.watched, self.control,
            self.sizes, self.ring, self.entries, signals, 0, self.ledger,
        )  # fmt: skip

    def write(self, word, value):
        """Write a word of the host, while the device is idle."""
        self.ring[word] = value

    def state(self):
        state = {name: getattr(self, name).tolist() for name in ("rows", "watched", "control")}
        return state | {"ring": self.ring.tolist()}


def play(seed, device="cpu", run=CPU, *, launches=20, largest=12):
    """Run random loops; yield a ``LoopEnd`` and the states of ops and model after each op."""
    random = Random(seed)
    sizes = sorted(random.sample(range(1, largest + 1), min(largest, random.randint(1, 5))))
    longest, entries = random.choice([1, 3, 8]), random.choice([1, 2, 3, 7])
    first = random.choice([0, MANY])
    model = LoopModel(sizes, Report.TOKENS + longest, entries, first)
    ops = LoopTensors(model, device, run)

    def write(word, value):
        model.ring[word] = value
        ops.write(word, value)

    for turn in range(launches):
        rows = random.sample(range(1, 2 * largest), random.randint(1, sizes[-1]))
        watched = [random.random() < 0.1 for _ in rows]
        max_steps = random.choice([1, 2, 5, 50])
        write(RingWord.READ, model.written)
        for each in (model, ops):
            each.begin(rows, watched, max_steps, first + turn + 1)
        yield LoopEnd.RUNNING, ops.state(), model.state()
        while model.again:
            if random.random() < 0.1:  # of the launch before, this one, the next
                write(RingWord.STOP, model.launch + random.choice([-1, -1, 0, 1]))
            if random.random() < 0.5:
                write(RingWord.READ, random.randint(model.ring[RingWord.READ], model.written))
            report = [line_of(row, longest, random) for row in model.rows]
            report += [line_of(0, longest, random)] * (model.size - len(report))
            end = model.advance(report)
            ops.advance(report, is_signalled=random.random() < 0.5)  # as several ranks do
            yield end, ops.state(), model.state()


def line_of(row, longest, random):
    """Return a row of a report; a tenth of the requests had ended before."""
    new = random.randint(1, longest)
    if row == 0 or random.random() < 0.1:
        return [0, 0, 0, RequestEnd.RUNNING, 0] + [-1] * longest
    end = random.choices(list(RequestEnd), [6, 1, 1])[0]
    tokens = [random.randrange(2**31) for _ in range(new)]
    return [row, random.randint(new, longest), new, end, longest - 1, *tokens] + [-1] * (
        longest - new
    )


def test_random_loops():
    ends = set()
    for seed in range(25):
        for end, got, want in play(seed):
            assert got == want
            ends.add(end)
    assert ends == set(LoopEnd), "every end occurs"


@triton.jit
def store(address, value):
    """Store without the instruction that the interpreter cannot run."""
    tl.store(address, value)


@pytest.mark.skipif(
    triton.__version__ < "3.7", reason="triton 3.6 with numpy 2.4 cannot interpret such a loop"
)
@by(INTERPRETER)
def test_random_loops_of_kernels(run, monkeypatch):
    monkeypatch.setattr(kernels, "_publish", store)
    monkeypatch.setattr(kernels, "_CHUNK", tl.constexpr(32))  # an entry has several
    for seed in range(6):
        for _, got, want in play(seed, run=run):
            assert got == want


@pytest.mark.gpu
@pytest.mark.parametrize("largest", [*sanitized(1, 12), 300])
def test_random_loops_on_cuda(largest):
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


@pytest.mark.gpu
def test_the_host_sees_whole_entries_while_the_device_writes():
    """The sequence number of an entry becomes visible after its report."""
    entries, columns, rows, steps, replays = 2, Report.TOKENS + 200, 16, 100, 100
    model = LoopModel([rows], columns, entries)
    ops = LoopTensors(model, "cuda")
    ops.begin(range(1, rows + 1), [False] * rows, 10**6, 1)
    report = torch.zeros(rows, columns, dtype=torch.int32, device="cuda")
    report[:, 0] = 1

    def write_entries():
        for _ in range(steps):
            report[:, Report.TOKENS :] += 1  # the number of the entry
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
            tokens = entry[ENTRY_WORDS:].reshape(rows, columns)[:, Report.TOKENS :]
            assert tokens.min() >= number, "the device may have written the next entry already"
            seen.add(number)
    assert len(seen) > 2
    assert stored[:, EntryWord.SEQUENCE].max() == steps * (replays + 1)


@pytest.fixture
def loop():
    """A loop at sizes 1, 2, 4 and a ring of 3 entries, and its report of given lines."""
    ops = LoopTensors(LoopModel([1, 2, 4], COLUMNS, 3))

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
    ops = LoopTensors(LoopModel([2], COLUMNS, 3, written))
    ops.begin([4, 6], [False, False], 50, 1)
    for number in range(written, written + 7):
        ops.write(RingWord.READ, number)
        ops.advance([[4, 1, 1, 0, 0, number - written, -1], [6, 1, 1, 0, 0, 1, -1]])
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
        "PLAIN_TIME": TIMES[0],
        "STEP_TIME": TIMES[1],
    }
    lines = loop.ring[RING_WORDS:].view(3, -1)[0][ENTRY_WORDS:].view(4, COLUMNS)
    assert lines[0].tolist() == RUNS
    assert lines[1].tolist() == [2, *RUNS[1:]]


def test_ends_of_requests_are_reasons_alike(loop):
    loop.begin([1, 2], [True, True], 50, 1)
    loop.step([1, 1, 1, RequestEnd.LENGTH, 0, 9, -1], RUNS)
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
         r"ring is \[16\] int64 on cpu, expected .* = \[148\] int64\.$"),
        (advance_loop, ADVANCE, {"ring": torch.zeros(296).long()[::2]}, "ring has strides"),
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
