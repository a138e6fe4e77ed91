"""What an observer writes: the graph, the source of its nodes, and the line that captured it."""

from __future__ import annotations

import os

import pytest
import torch

from graphkit.audit.foreign.hooks import RecordedCapture
from graphkit.audit.foreign.process_files import GraphFileWriter, collect
from graphkit.errors import InspectError
from graphkit.graphs import RecorderBackend


@pytest.fixture
def observer(tmp_path):
    return RecordedCapture(GraphFileWriter(tmp_path))


@pytest.fixture
def graph():
    """A graph that can be inspected without a GPU."""
    x = torch.ones(3)
    return RecorderBackend().capture(lambda: (x * 2).relu())


def recorded(tmp_path):
    return collect(tmp_path, ["train.py"], 0)


def capture_by_hand(observer):
    observer.before_begin()
    observer.after_begin()
    observer.before_end()


def test_the_graph_is_written_with_the_line_that_captured_it(observer, graph, tmp_path):
    capture_by_hand(observer)
    observer.after_end(graph)
    (record,) = recorded(tmp_path).record.graphs
    assert [node.short_name for node in record.nodes] == ["mul", "relu"]
    line = capture_by_hand.__code__.co_firstlineno + 1
    assert record.captured_at == f"foreign/test_observer.py:{line} in capture_by_hand"
    assert record.name == record.captured_at
    assert record.timing is None


def test_a_graph_is_written_even_if_the_start_of_its_capture_was_missed(observer, graph, tmp_path):
    observer.after_begin()
    observer.before_end()
    observer.after_end(graph)
    (record,) = recorded(tmp_path).record.graphs
    assert (record.captured_at, len(record.nodes)) == ("", 2)


def test_nothing_is_attributed_after_the_capture(observer):
    capture_by_hand(observer)
    before = list(observer.attribution.origins)
    torch.ones(3) * 2
    assert observer.attribution.origins == before
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()


def test_a_graph_that_cannot_be_inspected_counts_as_lost(observer, tmp_path):
    capture_by_hand(observer)
    with pytest.raises(InspectError):
        observer.after_end(torch.cuda.CUDAGraph.__new__)
    assert recorded(tmp_path).lost_graphs == {os.getpid(): 1}
    assert recorded(tmp_path).record is None
