"""A lock says what changed, and nothing of what differs from run to run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from graphkit.audit import AuditLog, fingerprint
from graphkit.audit.lock import check_lock, lock_of
from graphkit.records import (
    Argument,
    Edge,
    Environment,
    GraphRecord,
    LockRecord,
    Node,
    Pointer,
    Timing,
)

HERE = Environment(device="gpu", torch="2", triton="", cuda="13", driver="580", graphkit="0")


def pointer(address=1 << 41, name="layer.weight", memory="weight"):
    lies = Pointer(address=address, memory=memory, name=name)
    return Argument(size=8, kind="pointer", text=name, pointers=(lies,))


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
    check_lock(lock_of("t", before, HERE), lock_of("t", now, HERE), log)
    return log


TIMING = Timing(
    replays=3, p50_us=1.0, p95_us=1.0, busy_us=1.0, gap_us=0.0, critical_path=(0,),
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
def test_what_differs_from_run_to_run_is_left_out(graph, change):
    assert fingerprint(change(graph)) == fingerprint(graph)
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
def test_what_a_graph_consists_of_counts_and_is_said_in_words(graph, change, words):
    assert fingerprint(change(graph)) != fingerprint(graph)
    (finding,) = checked([graph], change(graph)).findings
    assert (finding.audit, finding.kind, finding.mode) == ("lock", "graph changed", "DECODE")
    assert words in finding.text


def test_graphs_that_come_and_go_are_found(graph):
    other = replace(graph, name="DECODE 2", batch_size=2)
    kinds = [finding.kind for finding in checked([graph], other).findings]
    assert kinds == ["graph is new", "graph is gone"]


def test_a_lock_survives_the_way_through_json(graph):
    lock = lock_of("t", [graph], HERE)
    assert LockRecord.from_json(lock.to_json()) == lock
    assert lock.fingerprints == {"DECODE 1": fingerprint(graph)}
