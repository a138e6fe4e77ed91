"""Reports of launch times and streams; times are given, not measured."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from graphkit.audit import AuditLog, audit_target
from graphkit.audit.launch import REPETITIONS, audit_streams, launch_us, report_launch
from graphkit.audit.locate_target import locate
from graphkit.errors import DeviceError
from graphkit.records import Edge, Environment, GraphRecord, Node

ROOT = Path(__file__).parents[3]
DIAMOND = [(0, 1), (0, 2), (1, 3), (2, 3)]
LINE = [(0, 1), (1, 2), (2, 3)]


def report(own_us, *kinds, edges=(), parents=()):
    """Report the launch of a graph, and return the text of the check and its findings."""
    nodes = tuple(
        Node(index=i, kind=kind, name=kind, short_name=kind, parent=dict(parents).get(i))
        for i, kind in enumerate(kinds)
    )
    record = GraphRecord(
        name="DECODE 8",
        backend="cuda",
        environment=Environment(device="", torch="", triton="", cuda="", driver="", graphkit=""),
        nodes=nodes,
        edges=tuple(Edge(source=source, target=target) for source, target in edges),
    )
    log = AuditLog()
    with log.check("launch", "DECODE", 8) as check:
        report_launch(record, own_us, check)
    return log.checks[0].text, log.findings


@pytest.mark.parametrize(
    ("kinds", "edges", "parents", "branches"),
    [
        (["kernel", "memcpy", "kernel"], [(0, 1), (1, 2)], (), ""),
        (["kernel"] * 4, DIAMOND, (), "; 1 fork and 1 join"),
        (["kernel"] * 3, [(0, 2), (1, 2)], (), "; 1 fork and 1 join"),  # two first nodes
        (
            ["child graph", *["kernel"] * 4],
            [(source + 1, target + 1) for source, target in DIAMOND],
            [(inner, 0) for inner in range(1, 5)],
            "",
        ),
    ],
)
def test_nodes_forks_and_joins_are_counted(kinds, edges, parents, branches):
    count = len(kinds)
    text, findings = report(6.0, *kinds, edges=edges, parents=parents)
    assert text == f"{count} nodes launch in 6.0 us ({6.0 / count:.3f} per node){branches}"
    assert not findings


@pytest.mark.parametrize(
    ("kinds", "edges", "cause", "what"),
    [
        (["kernel", "host", "kernel", "kernel"], DIAMOND, "forks", "1 fork and 1 join"),
        (
            ["kernel", "host", "event wait", "host"],
            LINE,
            "event wait, host",
            "1 event wait node, 2 host nodes and no fork",
        ),
        (["kernel"] * 4, LINE, "kernels", "kernels in one line"),
    ],
)
def test_a_slow_launch_names_what_the_graph_has(kinds, edges, cause, what):
    _, (finding,) = report(42.0, *kinds, edges=edges)
    assert (finding.severity, finding.kind, finding.cause) == ("note", "slow launch", cause)
    assert finding.text == (
        "the launch of 4 nodes takes 42.0 us of host time, 10.50 per node; a linear graph takes "
        f"about 10. It has {what}."
    )
    assert ("one stream" in finding.advice) == (cause == "forks")


def test_long_lines_may_take_longer():
    assert not report(42.0, *["kernel"] * 1000)[1]


@pytest.fixture
def driver(monkeypatch):
    """A driver that notes what it launches and returns ``error``."""
    fake = SimpleNamespace(launched=[], error=0, CUgraphExec=int, CUstream=int)

    def launch(graph, stream):
        fake.launched.append((graph, stream))
        return (fake.error,)

    fake.cuGraphLaunch = launch
    cuda, bindings = ModuleType("cuda"), ModuleType("cuda.bindings")
    cuda.bindings, bindings.driver = bindings, fake
    monkeypatch.setitem(sys.modules, "cuda", cuda)
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=5))
    return fake


def graph(handle):
    return SimpleNamespace(graph=SimpleNamespace(raw_cuda_graph_exec=lambda: handle))


def test_a_graph_is_launched_in_each_repetition(driver):
    prepared = []
    launch_us(graph(0xA), lambda: prepared.append(1))
    assert len(prepared) == REPETITIONS
    assert driver.launched == [(0xA, 5)] * REPETITIONS


def test_a_failed_launch_is_a_device_error(driver):
    driver.error = 700
    with pytest.raises(DeviceError, match="700"):
        launch_us(graph(0xA), lambda: None)


def test_the_recorder_is_not_measured(monkeypatch):
    monkeypatch.chdir(ROOT)
    target = locate("tools.examples.broken.sound:target", "cpu")
    report = audit_target(target, only=["launch"], device="cpu")
    (check,) = report.checks
    assert (check.audit, check.mode) == ("launch", "TARGET_VERIFY")
    assert check.text == "not checked: the recorder launches no graph"
    assert not report.findings


@pytest.mark.parametrize("count", [1, 3])
def test_streams_are_counted_and_are_no_finding(monkeypatch, count):
    monkeypatch.setattr("graphkit.audit.launch.streams_in_use", lambda _device: range(count))
    log = AuditLog()
    audit_streams(torch.device("cuda", 0), log)
    (check,) = log.checks
    assert check.text.startswith(f"{count} stream{'s' * (count > 1)} in use; ")
    assert not log.findings
