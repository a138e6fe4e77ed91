"""Trace events are valid and nest as Perfetto requires."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from graphkit.records import load_record
from graphkit.views.selection import named_graphs
from graphkit.views.trace import trace_text
from trace_format import ns, read_trace

DATA = Path(__file__).parents[2] / "data"


def events_of(*graphs):
    """All events, each checked against the format."""
    return read_trace(trace_text([(graph.name, graph) for graph in graphs]))


def slices(events, *, modules):
    found = [e for e in events if e["ph"] == "X"]
    return [e for e in found if (e["cat"] == "module") == modules]


def test_every_node_is_a_slice_with_its_own_time(graph):
    found = slices(events_of(graph), modules=False)
    assert sorted(event["args"]["node"] for event in found) == list(range(len(graph.nodes)))
    for event in found:
        node = graph.nodes[event["args"]["node"]]
        assert event["name"] == node.short_name
        if node.duration_us is not None:
            assert ns(event)[0] == round(node.start_us * 1000)
            assert ns(event)[1] == round((node.start_us + node.duration_us) * 1000)


def timed(graph, *times):
    nodes = [
        dataclasses.replace(node, start_us=start, duration_us=duration)
        for node, (start, duration) in zip(graph.nodes, times, strict=False)
    ]
    return dataclasses.replace(graph, nodes=tuple(nodes), edges=())


def test_a_nanosecond_is_not_lost_where_a_viewer_cuts_off(graph):
    """1.001 times 1000 is a little less than 1001."""
    times = [1.001, 2.003, 4.007, 8.009, 16.001]
    assert any(int(time * 1000.0) != round(time * 1000) for time in times)
    found = slices(events_of(timed(graph, *((time, 0.9) for time in times))), modules=False)
    assert [ns(event)[0] for event in found] == [round(time * 1000) for time in times]


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -5.0, 1e20, 1e308])
def test_an_invalid_time_is_0(graph, odd):
    found = slices(events_of(timed(graph, (odd, 1.0), (3.0, odd))), modules=False)
    assert len(found) == 2
    assert all(event["ts"] in (0.0, 3.0) for event in found)


def test_the_arguments_of_a_slice_are_facts_of_its_node(graph):
    (event,) = (e for e in slices(events_of(graph), modules=False) if e["args"]["node"] == 3)
    assert event["cat"] == "kernel"
    assert event["args"] == {
        "node": 3, "name": graph.nodes[3].name, "grid": "16x1x1", "block": "128x1x1",
        "op": "aten::mm", "source": "model.py:12 in forward", "module": "layers.0.attn.qkv",
    }  # fmt: skip


def test_one_process_per_graph(capture):
    events = events_of(*capture.graphs)
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {
        1: "TARGET_VERIFY 4", 2: "TARGET_VERIFY 8", 3: "DRAFT 4",
        4: "DRAFT 8 (not measured: a nominal 1 us per node)",
    }  # fmt: skip
    assert {e["pid"] for e in events} == set(names)
    tracks = {(e["pid"], e["tid"]) for e in events}
    assert {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"} == tracks


def test_a_graph_that_was_not_measured_takes_a_microsecond_per_node(capture):
    found = slices(events_of(capture.graphs[3]), modules=False)
    assert [(e["args"]["node"], e["ts"], e["dur"]) for e in found] == [
        (index, float(index), 1.0) for index in range(21)
    ]


def test_modules_are_nested_slices_around_their_nodes(graph):
    events = events_of(graph)
    modules = slices(events, modules=True)
    spans = {event["args"]["module"]: ns(event) for event in modules}
    assert {"layers", "layers.0", "layers.0.attn", "layers.0.attn.qkv", "sampler"} <= set(spans)
    for event in slices(events, modules=False):
        if path := event["args"].get("module"):
            begin, end = spans[path]
            assert begin <= ns(event)[0] <= ns(event)[1] <= end
    (layer,) = (event for event in modules if event["args"]["module"] == "layers.1")
    assert (layer["name"], layer["args"]["nodes"]) == ("1", 8)


@pytest.mark.parametrize("step", [0.0007, 1 / 3, 0.9, 2.5, 7.1])
def test_slices_nest_also_where_nodes_overlap(graph, step):
    """As with programmatic launches and parallel branches."""
    nodes = tuple(
        dataclasses.replace(node, start_us=node.index * step, duration_us=1.1 + node.index % 4)
        for node in graph.nodes
    )
    events = events_of(dataclasses.replace(graph, nodes=nodes))
    tracks = {event["tid"] for event in events if event["ph"] == "X"}
    assert len(tracks) > 2 or step > 5


def test_a_module_that_runs_twice_is_two_slices(make_graph):
    def places(_):
        for module in ("a", "b", "a"):
            yield {"kind": "kernel", "name": "k", "short_name": "k", "module": module}

    found = slices(events_of(make_graph("DRAFT", 1, places=places)), modules=True)
    assert [event["args"]["module"] for event in found] == ["a", "b", "a"]


def test_graphs_of_one_name_stay_apart(recording):
    events = read_trace(trace_text(named_graphs(recording)))
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names == ["runner.py:40", "runner.py:40 #2"]


def test_a_module_lasts_as_long_as_its_longest_node(graph):
    nodes = tuple(dataclasses.replace(node, module="m", parent=None) for node in graph.nodes[:2])
    long = dataclasses.replace(graph, nodes=nodes)
    (module,) = slices(events_of(timed(long, (0.0, 9.0), (1.0, 2.0))), modules=True)
    assert (module["ts"], module["dur"]) == (0.0, 9.0)


def test_the_trace_of_a_real_record_follows_the_format():
    graphs = load_record(DATA / "h200-capture.json").graphs
    nodes = slices(events_of(*graphs), modules=False)
    assert len(nodes) == sum(len(graph.nodes) for graph in graphs)
