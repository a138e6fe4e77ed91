"""Tests of locks: they report changes, and ignore what differs from run to run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from graphkit.audit import AuditLog, graph_baseline, graph_hash
from graphkit.audit.baseline import check_baseline, make_baseline
from graphkit.audit.locate_target import locate
from graphkit.records import (
    Argument,
    Edge,
    Environment,
    GraphBaseline,
    GraphRecord,
    Node,
    Pointer,
    Timing,
)

HERE = Environment(device="gpu", torch="2", triton="", cuda="13", driver="580", graphkit="0")


def pointer(address=1 << 41, name="layer.weight", memory="weight"):
    target = Pointer(address=address, memory=memory, name=name)
    return Argument(size=8, kind="pointer", text=name, pointers=(target,))


def number(text="0.5"):
    return Argument(size=4, kind="number", text=text)


@pytest.fixture
def graph():
    nodes = (
        Node(index=0, kind="kernel", name="void fill<float>(int)", short_name="fill",
             grid=(8, 1, 1), block=(128, 1, 1), arguments=(pointer(), number()), module="layer",
             source="a.py:1"),
        Node(index=1, kind="kernel", name="gemm", short_name="gemm", grid=(4, 4, 1),
             block=(384, 1, 1), arguments=(Argument(size=1720, kind="struct", text="1720 #1"),)),
    )  # fmt: skip
    return GraphRecord(
        name="DECODE 1", backend="cuda", environment=HERE, mode="DECODE", batch_size=1,
        nodes=nodes, edges=(Edge(source=0, target=1),),
    )  # fmt: skip


def changed(graph, index=0, **facts):
    nodes = list(graph.nodes)
    nodes[index] = replace(nodes[index], **facts)
    return replace(graph, nodes=tuple(nodes))


def checked(before, *now):
    log = AuditLog()
    check_baseline(make_baseline("t", before, HERE), make_baseline("t", now, HERE), log)
    return log


TIMING = Timing(
    replays=3, p50_us=1.0, p95_us=1.0, critical_path=(0,),
    critical_us=1.0, bound_by="order",
)  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        lambda g: replace(g, timing=TIMING),
        lambda g: replace(g, environment=replace(HERE, driver="590")),
        lambda g: replace(g, captured_at="elsewhere.py:9"),
        lambda g: changed(g, duration_us=3.0, start_us=1.0),
        lambda g: changed(g, source="a.py:2 in forward"),
        lambda g: changed(g, arguments=(pointer(address=1 << 42), number())),
        lambda g: changed(g, 1, arguments=(Argument(size=1720, kind="struct", text="1720 #2"),)),
    ],
)
def test_differences_between_runs_are_ignored(graph, change):
    assert graph_hash(change(graph)) == graph_hash(graph)
    assert not checked([graph], change(graph)).findings


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda g: changed(g, name="void fill<half>(int)", short_name="fill2"), "fill2"),
        (lambda g: changed(g, grid=(16, 1, 1)), "16x1x1"),
        (lambda g: changed(g, arguments=(pointer(), number("0.25"))), "0.25"),
        (lambda g: changed(g, arguments=(pointer(name="other.weight"), number())), "other.weight"),
        (lambda g: changed(g, cluster=(2, 1, 1)), "2x1x1"),
        (lambda g: replace(g, nodes=g.nodes[:1], edges=()), "gemm"),
        (
            lambda g: replace(g, edges=(Edge(source=0, target=1, kind="programmatic"),)),
            "programmatic",
        ),
    ],
)
def test_changes_of_a_graph_are_reported(graph, change, words):
    assert graph_hash(change(graph)) != graph_hash(graph)
    (finding,) = checked([graph], change(graph)).findings
    assert (finding.audit, finding.kind, finding.mode) == ("lock", "graph changed", "DECODE")
    assert finding.text.startswith("the graph differs from the lock file: ")
    assert words in finding.text


def test_new_and_missing_graphs_are_reported(graph):
    other = replace(graph, name="DECODE 2", batch_size=2)
    found = [(finding.kind, finding.text) for finding in checked([graph], other).findings]
    assert found == [
        ("graph is new", "the lock file has no such graph."),
        ("graph is gone", "the lock file has this graph, but it was not captured."),
    ]


def test_a_lock_can_be_saved_and_loaded(graph):
    lock = make_baseline("t", [graph], HERE)
    assert GraphBaseline.from_json(lock.to_json()) == lock
    assert lock.fingerprints == {"DECODE 1": graph_hash(graph)}


@pytest.mark.parametrize("now_us", [2.0, 900.0])
def test_times_are_shown_and_decide_nothing(graph, now_us):
    log = AuditLog()
    before, now = (make_baseline("t", [graph], HERE, {"DECODE 1": us}) for us in (2.04, now_us))
    check_baseline(before, now, log)
    (check,) = log.checks
    assert check.text.endswith(f"; a replay takes {now_us:.1f} us, and took 2.0")
    assert (log.findings, before.fingerprints) == ([], now.fingerprints)
    assert GraphBaseline.from_json(before.to_json()) == before


def test_the_lock_of_a_target_has_the_time_of_each_graph():
    lock = graph_baseline(locate("tools.examples.minimal_target:dense", "cpu"), device="cpu")
    assert lock.graphs
    assert lock.replay_us.keys() == lock.fingerprints.keys()
    assert all(us > 0 for us in lock.replay_us.values())


def test_numbers_that_differ_in_a_second_capture_are_not_locked(graph, monkeypatch):
    second = changed(graph, arguments=(pointer(address=1), number("0.25")))
    monkeypatch.setattr("graphkit.runners.Runner.inspect", lambda *_, **__: graph)
    monkeypatch.setattr("graphkit.audit.baseline.inspect_graph", lambda *_, **__: second)
    lock = graph_baseline(locate("tools.examples.minimal_target:dense", "cpu"), device="cpu")
    texts = [[argument.text for argument in record.nodes[0].arguments] for record in lock.graphs]
    assert texts
    assert all(text == ["layer.weight", "unset"] for text in texts)
