"""Locks of the graphs of a program: what they name, what they leave out, and what changes."""

from __future__ import annotations

import pytest

from graphkit.audit.baseline import check_program_lock, program_lock
from graphkit.records import Argument, Environment, ForeignRecord, GraphRecord, Node, Process

ENVIRONMENT = Environment(
    device="gpu", torch="2", triton="3", cuda="13", driver="580", graphkit="0"
)


def graph(line, *names, value="0.5", unset="0"):
    nodes = tuple(
        Node(
            index=index, kind="kernel", name=name, short_name=name, module="layers.0.mlp",
            source=f"model.py:{line} in forward",
            arguments=tuple(Argument(size=4, kind="number", text=t) for t in (value, unset)),
        )
        for index, name in enumerate(names)
    )  # fmt: skip
    place = f"engine/runner.py:{line} in capture"
    return GraphRecord(
        name=place, captured_at=place, backend="cuda", environment=ENVIRONMENT, nodes=nodes
    )


def record(*graphs):
    return ForeignRecord(
        command=("serve.py",), exit_code=0, environment=ENVIRONMENT, graphs=graphs,
        processes=(Process(pid=1, command=("serve.py",)),),
    )  # fmt: skip


LOCK = program_lock(
    record(graph(12, "gemm", "gelu"), graph(12, "norm")),
    record(graph(12, "gemm", "gelu", unset="7"), graph(12, "norm", unset="9")),
)


def test_graphs_are_named_without_lines_and_without_what_runs_differ_in():
    names = ["engine/runner.py capture (1)", "engine/runner.py capture (2)"]
    assert [graph.name for graph in LOCK.graphs] == names
    texts = [[a.text for a in node.arguments] for graph in LOCK.graphs for node in graph.nodes]
    assert texts == [["0.5", "unset"]] * 3


@pytest.mark.parametrize(("line", "unset"), [(12, "3"), (40, "0")])
def test_the_same_graphs_are_as_locked(line, unset):
    now = record(graph(line, "gemm", "gelu", unset=unset), graph(line, "norm", unset=unset))
    report = check_program_lock(LOCK, now)
    assert report.findings == ()
    assert len(report.checks) == 2


def test_a_change_names_graph_kernel_and_module():
    now = record(graph(12, "gemm", "gelu_fast"), graph(12, "norm", value="0.25"))
    kernel, argument = check_program_lock(LOCK, now).findings
    assert (kernel.kind, kernel.kernel, kernel.module) == (
        "graph changed", "gelu_fast", "layers.0.mlp",
    )  # fmt: skip
    assert kernel.mode == "engine/runner.py capture (1)"
    assert (argument.kernel, argument.mode) == ("norm", "engine/runner.py capture (2)")
    assert "0.25" in argument.text


def test_new_and_missing_graphs_are_named():
    now = record(graph(12, "gemm", "gelu"), graph(12, "norm"), graph(30, "norm"))
    (found,) = check_program_lock(LOCK, now).findings
    assert (found.kind, found.mode) == ("graph is new", "engine/runner.py capture (3)")
    (found,) = check_program_lock(LOCK, record(graph(12, "gemm", "gelu"))).findings
    assert (found.kind, found.mode) == ("graph is gone", "engine/runner.py capture (2)")
