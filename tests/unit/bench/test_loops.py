"""``tools/bench/loops.py`` finds lost, repeated and wrong tokens."""

from __future__ import annotations

import re

import pytest
import torch

from graphkit.engine.step import output_ring
from graphkit.engine.step.output_ring import OutputRing, StepReport
from graphkit.ops.loop_layout import LoopEnd, Report, RequestEnd


@pytest.fixture
def reader(bench):
    """A random reader of a runner of one size."""
    table = bench.Table(torch.device("cpu"))
    with bench.table_runner(table, 1, rows=4, batch_sizes=[4], ring_entries=8) as runner:
        runner.capture()
        yield bench.RandomReader(runner, table, 4, 8, seed=3)


def lose_a_token(line):
    line[Report.NEW] -= 1


def repeat_a_token(line):
    line[Report.TOKENS + 1] = line[Report.TOKENS]


def end_early(line):
    line[Report.END] = RequestEnd.STOP


def change_the_row(line):
    line[Report.ROW] += 1


TEXT = r"loop \d+: row \d has \[.*\], expected \["
ROWS = r"loop \d+: step \d+ ran other requests than \[.*\]: \["


@pytest.mark.parametrize(
    ("spoil", "message"),
    [(lose_a_token, TEXT), (repeat_a_token, TEXT), (end_early, TEXT), (change_the_row, ROWS)],
)
def test_a_spoilt_report_is_found(reader, monkeypatch, spoil, message):
    read, spoilt = OutputRing.read, []

    def read_spoilt(ring):
        block = read(ring)
        for place in block.offsets if block else ():
            for line in StepReport(block, place).words:
                if not spoilt and line[Report.NEW] > 1 and not line[Report.END]:
                    spoil(line)
                    spoilt.append(line)
        return block

    monkeypatch.setattr(OutputRing, "read", read_spoilt)
    while not spoilt:
        reader.turn()
    reader.deliver()
    assert [fault for fault in reader.faults if re.match(message, fault)]


def test_a_lost_step_is_found(reader, monkeypatch):
    read, lost = OutputRing.read, []

    def read_but_one(ring):
        block = read(ring)
        if block and not lost and block.loop_end is LoopEnd.RUNNING:
            lost.append(block)
            ring.release(block)
            return read(ring)
        return block

    monkeypatch.setattr(OutputRing, "read", read_but_one)
    while not lost:
        reader.turn()
    reader.deliver()
    assert reader.faults


def test_a_wrong_reason_of_an_end_is_found(reader, monkeypatch):
    wrong = (LoopEnd.RUNNING, *[LoopEnd.STEPS] * len(LoopEnd))
    monkeypatch.setattr(output_ring, "_LOOP_ENDS", wrong)
    for _ in range(10):
        reader.turn()
    reader.deliver()
    assert "it ended by" in reader.faults[0]
