"""Graph files written by processes that end in any way, and the record made from them."""

from __future__ import annotations

import os
import sys

import pytest

from graphkit.audit.foreign.process_files import FOLDER_VARIABLE, GraphFileWriter, collect
from graphkit.records import ForeignRecord

COMMAND = ("train.py", "--x")


@pytest.fixture
def writer(tmp_path):
    return GraphFileWriter(tmp_path)


def names(recorded):
    return [(graph.name, graph.process) for graph in recorded.record.graphs]


def test_graph_files_become_one_record(writer, tmp_path, graph_of):
    for name in "abc":
        writer.write(lambda name=name: graph_of(name))
    recorded = collect(tmp_path, COMMAND, 3)
    record = recorded.record
    assert names(recorded) == [("a", 0), ("b", 0), ("c", 0)]
    assert (record.command, record.exit_code, recorded.exit_code) == (COMMAND, 3, 3)
    assert record.environment == graph_of("a").environment
    assert [(p.pid, p.command) for p in record.processes] == [(os.getpid(), tuple(sys.orig_argv))]
    assert record.graphs[0].nodes == graph_of("a").nodes
    assert recorded.lost_graphs == {}
    assert ForeignRecord.from_json(record.to_json()) == record


def test_many_graphs_stay_in_order(writer, tmp_path, graph_of):
    for number in range(120):
        writer.write(lambda name=str(number): graph_of(name))
    recorded = collect(tmp_path, COMMAND, 0)
    assert names(recorded) == [(str(number), 0) for number in range(120)]


def test_processes_that_write_in_turns_stay_apart(tmp_path, graph_of, monkeypatch):
    first, second = GraphFileWriter(tmp_path), GraphFileWriter(tmp_path)
    for pid, writer, name in [(7, first, "a"), (5, second, "b"), (7, first, "c"), (5, second, "d")]:
        monkeypatch.setattr(os, "getpid", lambda pid=pid: pid)
        writer.write(lambda name=name: graph_of(name))
    recorded = collect(tmp_path, COMMAND, 0)
    assert names(recorded) == [("a", 0), ("c", 0), ("b", 1), ("d", 1)]
    assert [process.pid for process in recorded.record.processes] == [7, 5]


def test_a_reused_process_number_is_a_different_process(tmp_path, graph_of):
    for name in "ab":
        GraphFileWriter(tmp_path).write(lambda name=name: graph_of(name))
    recorded = collect(tmp_path, COMMAND, 0)
    assert names(recorded) == [("a", 0), ("b", 1)]


def test_a_forked_child_is_a_process_of_its_own(writer, tmp_path, graph_of, monkeypatch):
    """Imitate ``os.fork``: the same writer with a different process number."""
    writer.write(lambda: graph_of("a"))
    pid = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: pid + 1)
    writer.write(lambda: graph_of("b"))
    recorded = collect(tmp_path, COMMAND, 0)
    assert names(recorded) == [("a", 0), ("b", 1)]
    assert [process.pid for process in recorded.record.processes] == [pid, pid + 1]


@pytest.mark.parametrize("length", [0, 1, 200, -3])
def test_a_truncated_file_is_left_out_and_counted(writer, tmp_path, graph_of, length):
    for name in "abc":
        writer.write(lambda name=name: graph_of(name))
    file = sorted(tmp_path.iterdir())[1]
    file.write_bytes(file.read_bytes()[:length])
    recorded = collect(tmp_path, COMMAND, 0)
    assert names(recorded) == [("a", 0), ("c", 0)]
    assert recorded.lost_graphs == {os.getpid(): 1}


def test_a_graph_that_cannot_be_inspected_is_counted(writer, tmp_path, graph_of):
    def fails():
        raise RuntimeError("no bindings")

    for inspect in (fails, lambda: graph_of("b"), fails):
        try:
            writer.write(inspect)
        except RuntimeError:
            continue
    recorded = collect(tmp_path, COMMAND, 0)
    assert names(recorded) == [("b", 0)]
    assert recorded.lost_graphs == {os.getpid(): 2}


def test_a_folder_without_graphs(writer, tmp_path):
    recorded = collect(tmp_path, COMMAND, 4)
    assert (recorded.record, recorded.lost_graphs, recorded.imported_torch) == (None, {}, False)
    assert recorded.exit_code == 4
    writer.mark_torch_imported()
    writer.mark_torch_imported()
    assert collect(tmp_path, COMMAND, 4).imported_torch


def test_a_process_finds_its_recording_in_the_environment(tmp_path, graph_of, monkeypatch):
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    assert GraphFileWriter.from_environment() is None
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    GraphFileWriter.from_environment().write(lambda: graph_of("a"))
    assert names(collect(tmp_path, COMMAND, 0)) == [("a", 0)]
