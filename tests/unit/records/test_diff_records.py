"""Matching of the graphs and sizes of two records."""

from __future__ import annotations

import dataclasses
import types

import pytest

from graphkit.errors import RecordError
from graphkit.records import (
    BenchReport,
    CaptureRecord,
    DiffRecord,
    ForeignRecord,
    ModeRecord,
    Process,
    SizeRecord,
)
from graphkit.views.diff import diff_records


def mode_of(name, sizes):
    return ModeRecord(
        mode=name, tokens_per_request=1, host_planned=False, input_bytes=0,
        sizes=tuple(
            SizeRecord(
                batch_size=size, num_tokens=size, num_nodes=1, capture_ms=1.0, pool_bytes=pool
            )
            for (mode, size), pool in sizes.items() if mode == name
        ),
    )  # fmt: skip


@pytest.fixture
def capture_of(make_graph):
    """``capture_of((mode, size), ..., sizes={(mode, size): bytes})``: graphs of one node."""

    def make(*graphs, sizes=types.MappingProxyType({})):
        made = [make_graph("m op a", mode=m, batch_size=n, name=f"{m} {n}") for m, n in graphs]
        return CaptureRecord(
            target="tiny", backend="cuda", environment=make_graph().environment,
            modes=tuple(mode_of(name, sizes) for name in dict.fromkeys(m for m, _ in sizes)),
            graphs=tuple(made),
        )  # fmt: skip

    return make


@pytest.fixture
def recording_of(make_graph):
    def make(*places):
        """A place is ``file.py:12 in forward``; a graph is named after it."""
        graphs = [
            make_graph(f"m op {p.split()[-1]}", name=p.split()[0], captured_at=p) for p in places
        ]
        return ForeignRecord(
            command=("python", "serve.py"), exit_code=0, environment=make_graph().environment,
            processes=(Process(pid=1, command=("python",)),), graphs=tuple(graphs),
        )  # fmt: skip

    return make


def matched(diff):
    return [(graph.before, graph.after) for graph in diff.graphs]


def test_graphs_of_runners_are_matched_by_mode_and_size(capture_of):
    before = capture_of(("DRAFT", 1), ("DRAFT", 2), ("DECODE", 2))
    after = capture_of(("DECODE", 2), ("DRAFT", 2), ("DRAFT", 4))
    diff = diff_records(before, after)
    assert matched(diff) == [("DECODE 2", "DECODE 2"), ("DRAFT 2", "DRAFT 2")]
    assert (diff.only_before, diff.only_after) == (("DRAFT 1",), ("DRAFT 4",))


def test_equal_graphs_are_matched_in_order(capture_of):
    """As of two processes that captured the same sizes."""
    twice = capture_of(("DRAFT", 1), ("DRAFT", 1))
    diff = diff_records(twice, capture_of(("DRAFT", 1)))
    assert len(diff.graphs) == 1
    assert diff.only_before == ("DRAFT 1",)
    assert matched(diff_records(twice, twice)) == [("DRAFT 1", "DRAFT 1")] * 2


def test_sizes_are_compared_without_graphs(capture_of):
    before = capture_of(sizes={("DRAFT", 1): 64, ("DRAFT", 2): 64, ("DRAFT", 4): 9})
    after = capture_of(sizes={("DRAFT", 1): 64, ("DRAFT", 2): 96, ("DECODE", 4): 9})
    diff = diff_records(before, after)
    (size,) = diff.sizes
    assert (size.mode, size.batch_size) == ("DRAFT", 2)
    assert [(f.name, f.before, f.after) for f in size.figures] == [("pool_bytes", 64, 96)]
    assert (diff.only_before, diff.only_after) == (("DRAFT 4",), ("DECODE 4",))


def test_a_size_with_nodes_in_one_record_only_is_named_as_nodes(capture_of):
    sizes = {("DRAFT", 1): 64}
    diff = diff_records(capture_of(("DRAFT", 1), sizes=sizes), capture_of(sizes=sizes))
    assert (diff.only_before, diff.only_after) == (("nodes of DRAFT 1",), ())


def test_recorded_graphs_are_matched_by_line_then_name_then_function_then_order(recording_of):
    before = recording_of("a.py:1 in f", "d.py:2 in i", "b.py:5 in g", "c.py:7 in h", "a.py:1 in f")
    after = recording_of("c.py:7 in renamed", "b.py:9 in g", "new.py:2 in j", "a.py:1 in f")
    diff = diff_records(before, after)
    assert matched(diff) == [
        ("c.py:7", "c.py:7"), ("b.py:5", "b.py:9"), ("d.py:2", "new.py:2"), ("a.py:1", "a.py:1"),
    ]  # fmt: skip
    assert diff.only_before == ("a.py:1",)
    assert [graph.is_same for graph in diff.graphs] == [False, True, False, True]


def test_two_graphs_are_compared_whatever_their_sizes(make_graph):
    graphs = [make_graph("m op a", mode="DRAFT", batch_size=n, name=f"DRAFT {n}") for n in (1, 8)]
    diff = diff_records(*graphs)
    assert matched(diff) == [("DRAFT 1", "DRAFT 8")]
    assert (diff.only_before, diff.only_after) == ((), ())


def test_a_graph_is_a_record_with_one_graph(capture_of):
    capture = capture_of(("DRAFT", 1), ("DRAFT", 2))
    diff = diff_records(capture, capture.graphs[1])
    assert matched(diff) == [("DRAFT 2", "DRAFT 2")]
    assert diff.only_before == ("DRAFT 1",)
    assert (diff.before, diff.after) == ("tiny", "DRAFT 2")


def test_the_environment_is_compared(capture_of):
    before = capture_of()
    newer = dataclasses.replace(before.environment, driver="590", triton="")
    diff = diff_records(before, dataclasses.replace(before, environment=newer, backend="recorder"))
    assert [(c.field, c.before, c.after) for c in diff.environment] == [
        ("backend", "cuda", "recorder"), ("triton", "3.6.0", ""), ("driver", "580.1", "590"),
    ]  # fmt: skip


def test_a_record_without_graphs_is_refused(capture_of):
    capture = capture_of()
    bench = BenchReport(name="b", environment=capture.environment, settings={}, measures=())
    diff = diff_records(capture, capture)
    for pair in ((bench, capture), (capture, bench), (diff, capture)):
        with pytest.raises(RecordError, match=r"a record of kind '(bench|diff)' holds no graphs"):
            diff_records(*pair)


def test_a_diff_survives_json(capture_of, recording_of):
    diff = diff_records(capture_of(("DRAFT", 1)), recording_of("a.py:1 in f"))
    assert DiffRecord.from_json(diff.to_json()) == diff
