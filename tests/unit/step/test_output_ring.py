"""The output ring returns every entry once, in order and as it was when it was complete."""

from __future__ import annotations

import gc
from collections import Counter
from random import Random

import pytest
import torch

from graphkit.engine.step import LoopReader, StepReport, output_ring
from graphkit.engine.step.output_ring import OutputRing, RequestReport
from graphkit.ops.loop_layout import (
    ENTRY_WORDS,
    NO_LOGPROB,
    RING_WORDS,
    EntryWord,
    LoopEnd,
    Report,
    RequestEnd,
    RingWord,
)

ENTRIES, REQUESTS, LONGEST_PATH = 8, 3, 2
COLUMNS = Report.TOKENS + 2 * LONGEST_PATH
NO_LOGPROBS = [NO_LOGPROB] * LONGEST_PATH


class Writer:
    """Writes entries as the device does."""

    def __init__(self):
        self.ring = OutputRing(ENTRIES, REQUESTS, LONGEST_PATH, torch.device("cpu"))
        self.ring._fence = output_ring._fence  # also on hosts that need none
        self.written = 0

    @property
    def room(self):
        return ENTRIES - self.written + self.ring.num_read

    def write(self, launch, end=LoopEnd.RUNNING, lines=()):
        entry = self.ring.words[RING_WORDS:].view(ENTRIES, -1)[self.written % ENTRIES]
        assert self.room
        for index, line in enumerate(lines or [[1, 1, 1, 0, 0, self.written, 0]]):
            at = ENTRY_WORDS + index * COLUMNS
            entry[at : at + COLUMNS] = NO_LOGPROB
            entry[at : at + len(line)] = torch.tensor(line)
        entry[EntryWord.BATCH_SIZE] = len(lines) or 1
        entry[EntryWord.LOOP_END] = end
        entry[EntryWord.LAUNCH] = launch
        self.written += 1
        entry[EntryWord.SEQUENCE] = self.written


@pytest.fixture
def writer():
    return Writer()


@pytest.fixture
def reader(writer):
    return LoopReader(writer.ring, lambda: None, lambda: None, counts_lengths=False)


def take(ring):
    """Read and release the oldest entries."""
    if (block := ring.read()) is not None:
        ring.release(block)
    return block


def steps_of(block):
    return [StepReport(block, place) for place in block.offsets]


@pytest.mark.parametrize("seed", range(3))
def test_each_entry_is_read_once_and_in_order(writer, seed):
    random, launch, expected, found = Random(seed), 1, [], []
    for _ in range(200):
        for _ in range(random.randint(0, writer.room)):
            end = random.choice([LoopEnd.RUNNING, LoopEnd.RUNNING, LoopEnd.STEPS])
            expected.append((launch, writer.written, end))
            writer.write(launch, end)
            launch += bool(end)
        if block := take(writer.ring):
            steps = steps_of(block)
            assert {step.launch for step in steps} == {block.launch}
            assert block.loop_end is steps[-1].loop_end
            assert block.batch_sizes == [1] * len(steps)
            found += [(step.launch, step.rows[0][5], step.loop_end) for step in steps]
            assert writer.ring.num_read == len(found)
    while block := take(writer.ring):
        found += [(step.launch, step.rows[0][5], step.loop_end) for step in steps_of(block)]
    assert found == expected
    assert len(found) > 10 * ENTRIES


def test_all_entries_that_are_there_are_read_at_once():
    for count in range(1, ENTRIES + 1):
        writer = Writer()
        for _ in range(count):
            writer.write(1)
        assert len(take(writer.ring).offsets) == count
        assert take(writer.ring) is None


def test_an_entry_without_its_sequence_is_not_read(writer):
    writer.write(1)
    writer.write(1)
    entry = writer.ring.words[RING_WORDS:].view(ENTRIES, -1)[1]
    entry[EntryWord.SEQUENCE] = 0
    assert len(take(writer.ring).offsets) == 1
    assert take(writer.ring) is None
    entry[EntryWord.SEQUENCE] = 2
    assert len(take(writer.ring).offsets) == 1


def test_words_of_an_entry_are_read_after_the_fence(writer):
    """A host that reorders loads may see a sequence number before the words written before it."""
    for launch in (1, 2, 2):
        writer.write(launch)
    entries = writer.ring.words[RING_WORDS:].view(ENTRIES, -1)
    new, sequences = entries.clone(), entries[:, EntryWord.SEQUENCE].clone()
    entries.zero_()
    entries[:, EntryWord.SEQUENCE] = sequences
    writer.ring._fence = lambda: entries.copy_(new)
    blocks = [take(writer.ring) for _ in range(2)]
    assert [[step.launch for step in steps_of(block)] for block in blocks] == [[1], [2, 2]]
    assert [step.rows[0][5] for block in blocks for step in steps_of(block)] == [0, 1, 2]


def test_an_entry_is_released_after_the_fence(writer):
    writer.write(1)
    block, seen = writer.ring.read(), []
    writer.ring._fence = lambda: seen.append(writer.ring.num_read)
    writer.ring.release(block)
    assert (seen, writer.ring.num_read) == ([0], 1)


def test_a_report_keeps_its_words_when_the_entry_is_written_again(writer):
    writer.write(1)
    (step,) = steps_of(take(writer.ring))
    for _ in range(ENTRIES):
        writer.write(2)
    assert (step.launch, step.rows) == (1, [[1, 1, 1, 0, 0, 0, 0, *NO_LOGPROBS]])


def test_a_report_decodes_the_requests_that_took_part(writer):
    lines = [[5, 2, 2, 0, 3, 7, 8], [0] * 7, [2, 2, 1, int(RequestEnd.STOP), 3, 9, 6]]
    writer.write(1)
    writer.write(1, LoopEnd.REQUEST, lines)
    first, second = steps_of(take(writer.ring))
    assert (first.batch_size, first.is_last) == (1, False)
    assert (second.batch_size, second.is_last, second.loop_end) == (3, True, LoopEnd.REQUEST)
    words = [[*line, *NO_LOGPROBS] for line in lines]
    assert second.words.tolist() == words
    assert second.rows == [words[0], words[2]]
    assert second.requests == [
        RequestReport(5, (7, 8), 2, RequestEnd.RUNNING),
        RequestReport(2, (9,), 2, RequestEnd.STOP),
    ]


class TestStream:
    """A stream of one launch, of which several readers take steps."""

    def test_the_end_is_known_when_the_last_step_has_been_read(self, writer, reader):
        stream = reader.stream(1, 3)
        for end in (LoopEnd.RUNNING, LoopEnd.RUNNING, LoopEnd.STEPS):
            writer.write(1, end)
        ends = [stream.end for _ in stream]
        assert ends == [None, None, LoopEnd.STEPS]
        assert list(stream) == []
        assert stream.poll() is None

    def test_readers_share_the_steps(self, writer, reader):
        stream = reader.stream(1, 6)
        for _ in range(3):
            writer.write(1)
        numbers = [next(stream).rows[0][5]]
        for step in stream:
            numbers.append(step.rows[0][5])
            break
        numbers += [step.rows[0][5] for step in stream.available()]
        assert stream.poll() is None
        loop = iter(stream)
        for end in (LoopEnd.RUNNING, LoopEnd.RUNNING, LoopEnd.STEPS):
            writer.write(1, end)
        numbers.append(next(loop).rows[0][5])
        numbers.append(stream.poll().rows[0][5])
        numbers += [step.rows[0][5] for step in loop]
        assert numbers == list(range(6))
        assert stream.end is LoopEnd.STEPS

    def test_steps_in_flight_are_those_of_launches_that_have_not_ended(self, writer, reader):
        streams = [reader.stream(1, 5), reader.stream(2, 7)]
        assert reader.steps_in_flight == 12
        writer.write(1, LoopEnd.REQUEST)
        writer.write(2)
        reader.collect()
        assert reader.steps_in_flight == 7
        writer.write(2, LoopEnd.IDLE)
        assert len(list(streams[1])) == 2
        assert reader.steps_in_flight == 0
        assert reader.steps_by_size == {1: 3}

    def test_steps_of_a_stream_that_was_dropped_are_counted_and_dropped(self, writer, reader):
        reader.stream(1, 2)
        gc.collect()
        writer.write(1)
        writer.write(3, LoopEnd.STEPS)  # of a launch that was interrupted
        writer.write(1, LoopEnd.STEPS)
        reader.collect()
        assert writer.ring.words[RingWord.READ] == 3
        assert reader.steps_by_size == {1: 3}
        assert reader.steps_in_flight == 0


@pytest.mark.parametrize("seed", range(20))
def test_steps_are_counted_by_the_requests_that_took_part(writer, seed):
    """A request that has ended stays in the batch as a pad until a smaller size fits."""
    random, expected = Random(seed), Counter()
    reader = LoopReader(writer.ring, lambda: None, lambda: None, counts_lengths=False)
    for launch in range(1, 6):
        live = random.randint(0, REQUESTS)
        for _ in range(random.randint(1, writer.room)):
            live = random.randint(0, live) if random.random() < 0.4 else live
            lines = [[row < live, 1, 1, 0, 0, 7, 0] for row in range(REQUESTS)]
            random.shuffle(lines)
            writer.write(launch, lines=lines)
            expected[live] += 1
        reader.collect()
    assert reader.live_sizes == expected
