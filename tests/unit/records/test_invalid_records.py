"""Records whose indices, counts or times are invalid are refused when they are read."""

from __future__ import annotations

import copy
import json
import math
import re
import sys
from pathlib import Path

import pytest

import graphkit.records
from graphkit.errors import RecordError
from graphkit.records import GraphRecord, load_record
from graphkit.records.graph import MAX_DEPTH

FOLDER = Path(graphkit.records.__file__).parent
CAPTURE = Path(__file__).parents[2] / "data" / "h200-capture.json"
ENVIRONMENT = dict.fromkeys(("device", "torch", "triton", "cuda", "driver", "graphkit"), "")


def graph_body(count=3, **facts):
    """Return a graph of ``count`` nodes, each of which waits for the one before it, as JSON."""
    nodes = [
        {"index": i, "kind": "kernel", "name": "k", "short_name": "k", "duration_us": 1.5}
        for i in range(count)
    ]
    edges = [{"source": i, "target": i + 1} for i in range(count - 1)]
    body = {"schema": 2, "kind": "graph", "name": "g", "backend": "cuda",
            "environment": ENVIRONMENT, "nodes": nodes, "edges": edges}  # fmt: skip
    return {**body, **facts}


def timing(**facts):
    times = dict.fromkeys(("p50_us", "p95_us", "critical_us"), 1.0)
    return {"replays": 1, "critical_path": [0], "bound_by": "order", **times, **facts}


def refusal(body):
    with pytest.raises(RecordError) as caught:
        GraphRecord.from_json(json.dumps(body))
    return str(caught.value)


def test_a_real_record_cut_to_ten_nodes_is_refused(tmp_path):
    body = json.loads(CAPTURE.read_text(encoding="utf-8"))
    body["graphs"][0]["nodes"] = body["graphs"][0]["nodes"][:10]
    path = tmp_path / "cut.json"
    path.write_text(json.dumps(body), encoding="utf-8")
    with pytest.raises(RecordError) as caught:
        load_record(path)
    assert str(caught.value) == (
        f"{path}: not a whole record: capture.graphs[0].edges[9].target is 10; expected the index "
        "of a node, 0 to 9."
    )


@pytest.mark.parametrize(
    ("edge", "text"),
    [
        ({"source": 0, "target": 99999}, "target is 99999; expected the index of a node, 0 to 2."),
        ({"source": 3, "target": 1}, "source is 3; expected the index of a node, 0 to 2."),
        ({"source": -1, "target": 1}, "source: expected `int` >= 0."),
        ({"source": 1, "target": 1}, "target is 1; expected a node other than its source."),
    ],
)
def test_an_edge_to_a_node_that_does_not_exist_is_refused(edge, text):
    assert refusal(graph_body(edges=[{"source": 0, "target": 1}, edge])).endswith(
        f"graph.edges[1].{text}"
    )


def test_a_graph_without_nodes_has_no_edges():
    text = refusal(graph_body(0, edges=[{"source": 0, "target": 1}]))
    assert text.endswith("edges[0].source is 0; expected no index, because the graph has no nodes.")


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        ({"index": 0}, "index is 0; expected 1, the position of the node in the list."),
        ({"index": 2}, "index is 2; expected 1, the position of the node in the list."),
        ({"parent": 1}, "parent is 1; expected the index of an earlier node."),
        ({"parent": 2}, "parent is 2; expected the index of an earlier node."),
        ({"parent": -1}, "parent: expected `int` >= 0."),
        ({"registers": -1}, "registers: expected `int` >= 0."),
        ({"grid": [1, -1, 1]}, "grid[1]: expected `int` >= 0."),
        ({"module": "a." * MAX_DEPTH}, "module is a path of 101 names; expected at most 100."),
    ],
    ids=str,
)
def test_an_invalid_node_is_refused(facts, text):
    body = graph_body()
    body["nodes"][1].update(facts)
    assert refusal(body).endswith(f"graph.nodes[1].{text}")


@pytest.mark.parametrize("field", ["duration_us", "start_us"])
@pytest.mark.parametrize("value", [math.nan, "NaN", -1e300, -1, math.inf, "Infinity", 10**400])
def test_a_time_that_is_negative_or_not_finite_is_refused(field, value):
    body = graph_body()
    body["nodes"][1][field] = value
    assert f"graph.nodes[1].{field}: " in refusal(body)


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        ({"p50_us": math.nan}, "p50_us: expected `float` >= 0.0."),
        ({"replays": -1}, "replays: expected `int` >= 0."),
        ({"critical_path": [0, 3]}, "critical_path[1] is 3; expected the index of a node, 0 to 2."),
    ],
)
def test_an_invalid_timing_is_refused(facts, text):
    assert refusal(graph_body(timing=timing(**facts))).endswith(f"graph.timing.{text}")


def test_nodes_that_contain_each_other_without_end_are_refused():
    body = graph_body(1200)
    for index, node in enumerate(body["nodes"][1:]):
        node["parent"] = index
    text = refusal(body)
    assert text.endswith("nodes[101].parent is 100; expected a node inside at most 100 others.")


def test_a_graph_of_a_process_that_the_recording_lacks_is_refused(tmp_path):
    graph = {key: each for key, each in graph_body().items() if key not in ("schema", "kind")}
    body = {"schema": 2, "kind": "recording", "command": ["python"], "exit_code": 0,
            "environment": ENVIRONMENT, "processes": [{"pid": 7, "command": []}],
            "graphs": [graph, {**graph, "process": 1}]}  # fmt: skip
    path = tmp_path / "recording.json"
    path.write_text(json.dumps(body), encoding="utf-8")
    with pytest.raises(RecordError, match=r"graphs\[1\].process is 1; expected the index of one"):
        load_record(path)


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        (("target",), 5, "`str`, got `int`"),
        (("modes",), 5, "`array`, got `int`"),
        (("environment",), 5, "`object`, got `int`"),
        (("modes", 0, "host_planned"), 5, "`bool`, got `int`"),
        (("modes", 0, "input_bytes"), -5, "`int` >= 0"),
        (("modes", 0, "sizes", 0, "capture_ms"), math.nan, "`float` >= 0.0"),
        (("modes", 0, "sizes", 0, "batch_size"), "8", "`int`, got `str`"),
        (("modes", 0, "sizes", 0, "pool_bytes"), 1.5, "`int`, got `float`"),
        (("modes", 0, "stats"), 5, "`object | null`, got `int`"),
    ],
)
def test_a_refusal_says_what_was_expected(tmp_path, path, value, expected):
    body = owner = json.loads(CAPTURE.read_text(encoding="utf-8"))
    for key in path[:-1]:
        owner = owner[key]
    owner[path[-1]] = value
    file = tmp_path / "odd.json"
    file.write_text(json.dumps(body), encoding="utf-8")
    with pytest.raises(RecordError, match=rf"{path[-1]}: expected {re.escape(expected)}\.$"):
        load_record(file)


def test_an_optional_object_is_refused_for_the_value_in_it():
    """Not because it is no ``null``."""
    text = refusal(graph_body(memory={"graph_bytes": 1, "pool_bytes": 1, "segments": [{}]}))
    assert text.endswith("graph.memory.segments[0]: object missing required field `address`.")


def calls_while_reading(text):
    """Return the number of calls of functions of ``graphkit.records``."""
    calls = []

    def count(frame, event, _):
        if event == "call" and Path(frame.f_code.co_filename).parent == FOLDER:
            calls.append(frame.f_code.co_name)

    sys.setprofile(count)
    try:
        GraphRecord.from_json(text)
    finally:
        sys.setprofile(None)
    return len(calls)


def test_reading_costs_no_call_per_node():
    texts = [json.dumps(graph_body(count)) for count in (100, 200, 400)]
    assert len(set(map(calls_while_reading, texts))) == 1


def test_the_body_of_these_tests_is_valid():
    body = graph_body(timing=timing())
    assert len(GraphRecord.from_json(json.dumps(copy.deepcopy(body))).nodes) == 3
