"""Lock files: the contents of the graphs of a target or a program, to detect changes.

A new driver, a new kernel library or a changed model shows as different kernels, grids or
arguments. A lock leaves out what differs from run to run: addresses, times, and unset bytes.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from graphkit.audit.audit_log import AuditLog
from graphkit.audit.finding_kinds import FindingKind
from graphkit.audit.runs.capture import duration_us
from graphkit.graphs import UNSET_MARKER, Attribution, inspect_graph
from graphkit.records import (
    Argument,
    AuditReport,
    Environment,
    ForeignRecord,
    GraphBaseline,
    GraphRecord,
    Node,
    Pointer,
    count_of,
)
from graphkit.records.audit import Audit
from graphkit.runners import Runner
from graphkit.runners.comparison.step_comparison import SEED
from graphkit.runners.targets import CaptureTarget
from graphkit.views.diff import diff_graphs

_NO_ENVIRONMENT = Environment(device="", torch="", triton="", cuda="", driver="", graphkit="")
_MAX_SENTENCES = 6
_LINE = re.compile(r":\d+ in ")
_DECLARED = ("weight", "state", "input", "mailbox")
"""Kinds of memory whose names do not change from run to run."""


class LockedGraphs:
    """The graphs of captured runners of a target, for its lock.

    Attributes:
        graphs: The graphs, without arguments that differ in a second capture.
        replay_us: Median microseconds of replays of full batches, by the names of graphs. The whole
            step of an engine has none: it has no sample batches.
    """

    def __init__(self, target: CaptureTarget) -> None:
        self._target, self.graphs, self.replay_us = target, list[GraphRecord](), dict[str, float]()

    def add(self, runner: Runner[Any, Any]) -> None:
        """Add the graphs of a captured runner, which has none if its mode runs eagerly."""
        if runner.eager_reason:
            return
        target, weights = self._target, self._target.weights
        names = runner.memory_names(weights)
        attribution = Attribution(weights, stack_fill=UNSET_MARKER)
        with runner.recapture(attribution=attribution) as graphs:
            second = {size: inspect_graph(graph, names=names) for size, graph in graphs.items()}
        for size in runner.table:
            graph = without_unset_numbers(runner.inspect(size, weights=weights), second[size])
            self.graphs.append(graph)
            if runner.mode in target.forwards:
                batch = target.batch(runner.mode, min(size, runner.table.max_batch_size), SEED)
                replay = partial(runner.replay, batch, padded_batch_size=size)
                self.replay_us[graph.name] = round(duration_us(runner, replay), 2)

    def baseline(self, environment: Environment) -> GraphBaseline:
        """Return the lock of the graphs that were added."""
        return make_baseline(self._target.name, self.graphs, environment, self.replay_us)


def make_baseline(
    target: str,
    graphs: Sequence[GraphRecord],
    environment: Environment,
    replay_us: Mapping[str, float] | None = None,
) -> GraphBaseline:
    """Return the lock of the graphs of a target, with the times of replays that were measured."""
    locked = tuple(_locked(graph) for graph in graphs)
    return GraphBaseline(
        target=target,
        environment=environment,
        fingerprints={graph.name: graph_hash(graph) for graph in locked},
        graphs=locked,
        replay_us=replay_us or {},
    )


def graph_hash(graph: GraphRecord) -> str:
    """Return a hash of a graph's kernels, launches, edges and arguments, 16 hex digits."""
    plain = replace(_locked(graph), environment=_NO_ENVIRONMENT)
    return hashlib.blake2b(plain.to_json().encode(), digest_size=8).hexdigest()


def check_baseline(lock: GraphBaseline, now: GraphBaseline, log: AuditLog) -> None:
    """Report what changed since a lock was written."""
    before = {graph.name: graph for graph in lock.graphs}
    for graph in now.graphs:
        with log.check(Audit.LOCK, graph.mode, graph.batch_size) as check:
            locked = before.pop(graph.name, None)
            if locked is None:
                check.text = "not in the lock file"
                check.report(FindingKind.GRAPH_IS_NEW, "the lock file has no such graph.")
            elif lock.fingerprints.get(graph.name) == now.fingerprints[graph.name]:
                check.text = f"as locked: {now.fingerprints[graph.name]}"
            else:
                check.text = f"changed: {now.fingerprints[graph.name]}"
                diff = diff_graphs(locked, graph)
                text = _summary((*diff.words, *diff.details))
                pairs = zip(locked.nodes, graph.nodes, strict=False)
                node = next((now for was, now in pairs if was != now), None)
                check.report(FindingKind.GRAPH_CHANGED, text, node=node)
            if graph.name in now.replay_us and graph.name in lock.replay_us:
                took, takes = lock.replay_us[graph.name], now.replay_us[graph.name]
                check.text += f"; a replay takes {takes:.1f} us, and took {took:.1f}"
    for graph in before.values():
        with log.check(Audit.LOCK, graph.mode, graph.batch_size) as check:
            check.text = "not captured"
            text = "the lock file has this graph, but it was not captured."
            check.report(FindingKind.GRAPH_IS_GONE, text)


def program_lock(record: ForeignRecord, again: ForeignRecord) -> GraphBaseline:
    """Return the lock of a program's graphs.

    Args:
        record: The graphs of a run.
        again: Those of a second run. Numbers that differ between the runs are not locked: kernels
            leave some of their argument bytes unset.
    """
    second = {graph.name: graph for graph in _named(again.graphs)}
    graphs = [
        without_unset_numbers(graph, second.get(graph.name, graph))
        for graph in _named(record.graphs)
    ]
    return make_baseline(record.title, graphs, record.environment)


def check_program_lock(lock: GraphBaseline, record: ForeignRecord) -> AuditReport:
    """Return what differs between a program's graphs and a lock; a changed graph is an error."""
    log, locked = AuditLog(), {graph.name: graph for graph in lock.graphs}
    graphs = [
        _map_arguments(
            graph,
            locked.get(graph.name, graph),
            lambda now, before: replace(now, text="unset") if before.text == "unset" else now,
        )
        for graph in _named(record.graphs)
    ]
    check_baseline(lock, make_baseline(record.title, graphs, record.environment), log)
    return log.report(record.title, record.backend, record.environment)


def _named(graphs: Sequence[GraphRecord]) -> Iterator[GraphRecord]:
    """Name graphs by file and function of their capture, without lines, and by their order."""
    counts: Counter[str] = Counter()
    for graph in graphs:
        place = _LINE.sub(" ", graph.captured_at or graph.name) or "unknown"
        counts[place] += 1
        name = f"{place} ({counts[place]})"
        yield replace(graph, name=name, mode=name)


def without_unset_numbers(graph: GraphRecord, second: GraphRecord) -> GraphRecord:
    """Return a graph with ``unset`` for each number that a second capture has differently."""

    def settled(one: Argument, other: Argument) -> Argument:
        is_settled = one.kind != "number" or one.text == other.text
        return one if is_settled else replace(one, text="unset")

    return _map_arguments(graph, second, settled)


def _map_arguments(
    graph: GraphRecord, other: GraphRecord, change: Callable[[Argument, Argument], Argument]
) -> GraphRecord:
    """Change each argument by that of another graph of as many nodes and arguments."""
    if len(graph.nodes) != len(other.nodes):
        return graph
    nodes = tuple(
        replace(node, arguments=tuple(map(change, node.arguments, its.arguments)))
        if len(node.arguments) == len(its.arguments)
        else node
        for node, its in zip(graph.nodes, other.nodes, strict=True)
    )
    return replace(graph, nodes=nodes)


def _summary(sentences: Sequence[str]) -> str:
    more = len(sentences) - _MAX_SENTENCES
    shown = [*sentences[:_MAX_SENTENCES], *([count_of(more, "more change")] if more > 0 else [])]
    return f"the graph differs from the lock file: {'; '.join(shown)}."


def _locked(graph: GraphRecord) -> GraphRecord:
    nodes = tuple(_locked_node(node) for node in graph.nodes)
    return replace(graph, nodes=nodes, timing=None, memory=None, captured_at="")


def _locked_node(node: Node) -> Node:
    arguments = tuple(_locked_argument(argument) for argument in node.arguments)
    if node.kind == "kernel":  # the names of a kernel's parameters are not known in every process
        arguments = tuple(replace(argument, name="") for argument in arguments)
    return replace(node, arguments=arguments, source="", duration_us=None, start_us=None)


def _locked_argument(argument: Argument) -> Argument:
    """Return an argument by value, by the memory that it points to, or as a struct by size."""
    names = ((p.memory, p.name if p.memory in _DECLARED else p.memory) for p in argument.pointers)
    pointers = tuple(Pointer(address=0, memory=memory, name=name) for memory, name in names)
    if argument.kind in ("pointer", "tensor"):
        text = argument.text if argument.kind == "tensor" else pointers[0].name
        return replace(argument, text=text, pointers=pointers)
    if argument.kind == "struct" or argument.size < 4:
        return replace(argument, text=f"{argument.size} bytes", pointers=())
    return argument
