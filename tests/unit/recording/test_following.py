"""What is written down of a capture: the graph, what made its nodes, and who captured it."""

from __future__ import annotations

import os

import pytest
import torch

from graphkit.errors import InspectError
from graphkit.graphs import RecorderBackend
from graphkit.recording.following import Following
from graphkit.recording.parts import PartWriter, put_together


@pytest.fixture
def following(tmp_path):
    return Following(PartWriter(tmp_path))


@pytest.fixture
def graph():
    """A graph that can be looked into without a GPU."""
    x = torch.ones(3)
    return RecorderBackend().capture(lambda: (x * 2).relu())


def recorded(tmp_path):
    return put_together(tmp_path, ["train.py"], 0)


def capture_by_hand(following):
    following.beginning()
    following.begun()
    following.ending()


def test_the_graph_is_written_down_with_its_place(following, graph, tmp_path):
    capture_by_hand(following)
    following.ended(graph)
    (record,) = recorded(tmp_path).record.graphs
    assert [node.short_name for node in record.nodes] == ["mul", "relu"]
    line = capture_by_hand.__code__.co_firstlineno + 1
    assert record.captured_at == f"recording/test_following.py:{line} in capture_by_hand"
    assert record.name == record.captured_at
    assert record.timing is None


def test_a_graph_is_written_down_without_what_could_not_be_noted(following, graph, tmp_path):
    following.begun()
    following.ending()
    following.ended(graph)
    (record,) = recorded(tmp_path).record.graphs
    assert (record.captured_at, len(record.nodes)) == ("", 2)


def test_nothing_is_noted_any_more_after_the_capture(following):
    capture_by_hand(following)
    before = list(following._attribution.places)
    torch.ones(3) * 2
    assert following._attribution.places == before
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()


def test_a_graph_that_cannot_be_looked_into_counts_as_lost(following, tmp_path):
    capture_by_hand(following)
    with pytest.raises(InspectError):
        following.ended(torch.cuda.CUDAGraph.__new__)
    assert recorded(tmp_path).lost == {os.getpid(): 1}
    assert recorded(tmp_path).record is None
