"""Lock files of the graphs that a program captures, to find what an upgrade changes in them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from graphkit.audit.audit_log import AuditLog
from graphkit.audit.baseline import check_baseline, make_baseline, without_unset_numbers
from graphkit.records import AuditReport, ForeignRecord, GraphBaseline, GraphRecord
from graphkit.records.audit import worst_first

_LINE = re.compile(r":\d+ in ")


def program_lock(record: ForeignRecord, again: ForeignRecord) -> GraphBaseline:
    """Return the lock of a program's graphs.

    Args:
        record: The graphs of a run.
        again: Those of a second run. Numbers that differ between the runs are not locked: kernels
            leave some of their argument bytes unset.
    """
    second = {graph.name: graph for graph in _named(again.graphs)}
    graphs = [
        without_unset_numbers(one, second.get(one.name, one)) for one in _named(record.graphs)
    ]
    return make_baseline(record.title, graphs, record.environment)


def check_program_lock(lock: GraphBaseline, record: ForeignRecord) -> AuditReport:
    """Return what differs between a program's graphs and a lock; a changed graph is an error."""
    log, locked = AuditLog(), {graph.name: graph for graph in lock.graphs}
    graphs = [
        _with_unset_numbers(one, locked[one.name]) if one.name in locked else one
        for one in _named(record.graphs)
    ]
    check_baseline(lock, make_baseline(record.title, graphs, record.environment), log)
    return AuditReport(
        target=record.title,
        backend=record.backend,
        environment=record.environment,
        checks=tuple(log.checks),
        findings=worst_first(log.findings),
    )


def _named(graphs: Sequence[GraphRecord]) -> list[GraphRecord]:
    """Name graphs by file and function of their capture, without lines, and by their order."""
    counts: Counter[str] = Counter()
    named = []
    for graph in graphs:
        place = _LINE.sub(" ", graph.captured_at or graph.name) or "unknown"
        counts[place] += 1
        name = f"{place} ({counts[place]})"
        named.append(replace(graph, name=name, mode=name))
    return named


def _with_unset_numbers(graph: GraphRecord, locked: GraphRecord) -> GraphRecord:
    """Return a graph with ``unset`` where its lock has it."""
    if len(graph.nodes) != len(locked.nodes):
        return graph
    nodes = tuple(
        replace(
            node,
            arguments=tuple(
                replace(now, text=before.text) if before.text == "unset" else now
                for now, before in zip(node.arguments, its.arguments, strict=True)
            ),
        )
        if len(node.arguments) == len(its.arguments)
        else node
        for node, its in zip(graph.nodes, locked.nodes, strict=True)
    )
    return replace(graph, nodes=nodes)
