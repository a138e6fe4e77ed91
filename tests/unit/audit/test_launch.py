"""Reports of launch times and streams; times are given, not measured."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from graphkit.audit import AuditLog, audit_target
from graphkit.audit.launch import GraphShape, LaunchTimes, audit_streams, report_launch
from graphkit.audit.locate_target import locate
from graphkit.records import Edge, Environment, GraphRecord, Node

ROOT = Path(__file__).parents[3]
CHAIN = LaunchTimes(own=5.2, linear=5.0, branched=5.0)


def record(*kinds, edges=(), parents=None):
    parents = parents or {}
    nodes = tuple(
        Node(index=i, kind=kind, name=kind, short_name=kind, parent=parents.get(i))
        for i, kind in enumerate(kinds)
    )
    return GraphRecord(
        name="DECODE 8",
        backend="cuda",
        environment=Environment(device="", torch="", triton="", cuda="", driver="", graphkit=""),
        nodes=nodes,
        edges=tuple(Edge(source=source, target=target) for source, target in edges),
    )


DIAMOND = [(0, 1), (0, 2), (1, 3), (2, 3)]


@pytest.fixture
def report():
    """Report the launch of a graph, and return the check and its findings."""

    def reported(shape, times):
        log = AuditLog()
        with log.check("launch", "DECODE", 8) as check:
            report_launch(shape, times, check)
        return log.checks[0], log.findings

    return reported


def test_the_shape_of_a_line(report):
    shape = GraphShape.from_record(record("kernel", "memcpy", "kernel", edges=[(0, 1), (1, 2)]))
    assert (shape.num_nodes, shape.forks, shape.joins) == (3, 0, 0)
    assert shape.dependencies == {0: [], 1: [0], 2: [1]}
    assert shape.others == {"memcpy": 1}
    check, findings = report(shape, CHAIN)
    assert check.text == (
        "3 nodes launch in 5.2 us (1.733 per node), a linear graph of as many in 5.0 us "
        "(1.667 per node)"
    )
    assert not findings


def test_forks_and_joins_are_counted():
    shape = GraphShape.from_record(record(*["kernel"] * 4, edges=DIAMOND))
    assert (shape.forks, shape.joins) == (1, 1)
    assert shape.dependencies == {0: [], 1: [0], 2: [0], 3: [1, 2]}
    two_firsts = GraphShape.from_record(record(*["kernel"] * 3, edges=[(0, 2), (1, 2)]))
    assert (two_firsts.forks, two_firsts.joins) == (1, 1)


def test_nodes_of_child_graphs_count_as_nodes_alone():
    kinds = ["child graph", *["kernel"] * 4]
    inner = dict.fromkeys(range(1, 5), 0)
    edges = [(source + 1, target + 1) for source, target in DIAMOND]
    shape = GraphShape.from_record(record(*kinds, edges=edges, parents=inner))
    assert (shape.num_nodes, shape.forks, shape.joins) == (5, 0, 0)
    assert shape.dependencies == {0: []}
    assert shape.others == {"child graph": 1}


def test_forks_that_cost_the_time_are_named(report):
    shape = GraphShape.from_record(record("kernel", "host", "kernel", "kernel", edges=DIAMOND))
    check, (finding,) = report(shape, LaunchTimes(own=42.0, linear=5.0, branched=40.0))
    assert (finding.severity, finding.kind, finding.cause) == ("note", "slow launch", "forks")
    assert finding.text == (
        "the launch of 4 nodes takes 42.0 us (10.500 per node) of host time, and the "
        "launch of a linear graph of as many nodes 5.0 us (1.250 per node): 1 fork and 1 join make "
        "it slow, as trivial kernels with the same dependencies take 40.0 us."
    )
    assert "one stream" in finding.advice
    assert check.text.endswith("; 1 fork and 1 join")


@pytest.mark.parametrize(
    ("edges", "without_forks"),
    [
        ([(0, 1), (1, 2), (2, 3)], "it has no forks"),
        (DIAMOND, "not its forks: trivial kernels with the same dependencies take 6.0 us"),
    ],
)
def test_other_nodes_are_named_if_forks_do_not_cost_the_time(report, edges, without_forks):
    shape = GraphShape.from_record(record("kernel", "host", "event wait", "host", edges=edges))
    _, (finding,) = report(shape, LaunchTimes(own=42.0, linear=5.0, branched=6.0))
    assert finding.cause == "event wait, host"
    assert finding.text.endswith(
        f"what else distinguishes it is 1 event wait node, 2 host nodes ({without_forks})."
    )


def test_kernels_are_named_if_there_is_nothing_else(report):
    shape = GraphShape.from_record(record("kernel", "kernel", edges=[(0, 1)]))
    _, (finding,) = report(shape, LaunchTimes(own=42.0, linear=5.0, branched=5.0))
    assert finding.cause == "kernels"
    assert finding.text.endswith("its kernels make it slow (it has no forks).")


def test_the_recorder_is_not_measured(monkeypatch):
    monkeypatch.chdir(ROOT)
    target = locate("tools.examples.broken.sound:target", "cpu")
    report = audit_target(target, only=["launch"], device="cpu")
    (check,) = report.checks
    assert (check.audit, check.mode) == ("launch", "TARGET_VERIFY")
    assert check.text == "not measured: the recorder launches no graph"
    assert not report.findings


@pytest.mark.parametrize("count", [1, 3])
def test_streams_are_counted_and_are_no_finding(monkeypatch, count):
    monkeypatch.setattr("graphkit.audit.launch.streams_in_use", lambda _device: range(count))
    log = AuditLog()
    audit_streams(torch.device("cuda", 0), log)
    (check,) = log.checks
    assert check.text.startswith(f"{count} stream{'s' * (count > 1)} in use; ")
    assert not log.findings
