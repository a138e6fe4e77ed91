"""Parts written by processes that end in any way, and what is put together of them."""

from __future__ import annotations

import os
import sys

import pytest

from graphkit.recording.parts import FOLDER, PartWriter, put_together
from graphkit.records import RecordingRecord

WORDS = ("train.py", "--x")


@pytest.fixture
def writer(tmp_path):
    return PartWriter(tmp_path)


def names(recorded):
    return [(graph.name, graph.process) for graph in recorded.record.graphs]


def test_parts_become_one_record(writer, tmp_path, graph_of):
    for name in "abc":
        writer.add(lambda name=name: graph_of(name))
    recorded = put_together(tmp_path, WORDS, 3)
    record = recorded.record
    assert names(recorded) == [("a", 0), ("b", 0), ("c", 0)]
    assert (record.command, record.exit_code, recorded.exit_code) == (WORDS, 3, 3)
    assert record.environment == graph_of("a").environment
    assert [(p.pid, p.command) for p in record.processes] == [(os.getpid(), tuple(sys.orig_argv))]
    assert record.graphs[0].nodes == graph_of("a").nodes
    assert recorded.lost == {}
    assert RecordingRecord.from_json(record.to_json()) == record


def test_many_graphs_stay_in_order(writer, tmp_path, graph_of):
    for number in range(120):
        writer.add(lambda name=str(number): graph_of(name))
    recorded = put_together(tmp_path, WORDS, 0)
    assert names(recorded) == [(str(number), 0) for number in range(120)]


def test_processes_stay_apart_though_they_take_turns(tmp_path, graph_of, monkeypatch):
    first, second = PartWriter(tmp_path), PartWriter(tmp_path)
    for pid, writer, name in [(7, first, "a"), (5, second, "b"), (7, first, "c"), (5, second, "d")]:
        monkeypatch.setattr(os, "getpid", lambda pid=pid: pid)
        writer.add(lambda name=name: graph_of(name))
    recorded = put_together(tmp_path, WORDS, 0)
    assert names(recorded) == [("a", 0), ("c", 0), ("b", 1), ("d", 1)]
    assert [process.pid for process in recorded.record.processes] == [7, 5]


def test_a_number_that_comes_again_is_another_process(tmp_path, graph_of):
    for name in "ab":
        PartWriter(tmp_path).add(lambda name=name: graph_of(name))
    recorded = put_together(tmp_path, WORDS, 0)
    assert names(recorded) == [("a", 0), ("b", 1)]


def test_a_forked_child_is_a_process_of_its_own(writer, tmp_path, graph_of, monkeypatch):
    """As ``os.fork`` leaves it: the same writer, another number."""
    writer.add(lambda: graph_of("a"))
    pid = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: pid + 1)
    writer.add(lambda: graph_of("b"))
    recorded = put_together(tmp_path, WORDS, 0)
    assert names(recorded) == [("a", 0), ("b", 1)]
    assert [process.pid for process in recorded.record.processes] == [pid, pid + 1]


@pytest.mark.parametrize("length", [0, 1, 200, -3])
def test_a_part_that_is_cut_off_is_left_out_and_counted(writer, tmp_path, graph_of, length):
    for name in "abc":
        writer.add(lambda name=name: graph_of(name))
    part = sorted(tmp_path.iterdir())[1]
    part.write_bytes(part.read_bytes()[:length])
    recorded = put_together(tmp_path, WORDS, 0)
    assert names(recorded) == [("a", 0), ("c", 0)]
    assert recorded.lost == {os.getpid(): 1}


def test_a_graph_that_cannot_be_looked_into_is_counted(writer, tmp_path, graph_of):
    def fails():
        raise RuntimeError("no bindings")

    for make in (fails, lambda: graph_of("b"), fails):
        try:
            writer.add(make)
        except RuntimeError:
            continue
    recorded = put_together(tmp_path, WORDS, 0)
    assert names(recorded) == [("b", 0)]
    assert recorded.lost == {os.getpid(): 2}


def test_no_part_at_all(writer, tmp_path):
    recorded = put_together(tmp_path, WORDS, 4)
    assert (recorded.record, recorded.lost, recorded.imported_torch) == (None, {}, False)
    assert recorded.exit_code == 4
    writer.note_torch()
    writer.note_torch()
    assert put_together(tmp_path, WORDS, 4).imported_torch


def test_a_process_finds_its_recording_in_the_environment(tmp_path, graph_of, monkeypatch):
    monkeypatch.delenv(FOLDER, raising=False)
    assert PartWriter.of_this_process() is None
    monkeypatch.setenv(FOLDER, str(tmp_path))
    PartWriter.of_this_process().add(lambda: graph_of("a"))
    assert names(put_together(tmp_path, WORDS, 0)) == [("a", 0)]
