"""What a target's graphs consist of, kept in a file, so that a change does not go unseen.

A new driver, a new kernel library or a changed model shows as other kernels, grids or arguments.
What differs from run to run is left out: addresses, times, and the unused bytes of structs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from graphkit.audit.audit_log import AuditLog
from graphkit.diff import diff_graphs
from graphkit.graphs import UNSET_MARKER, Attribution, inspect_graph
from graphkit.records import Argument, Environment, GraphRecord, LockRecord, Node, Pointer
from graphkit.runners import Runner
from graphkit.targets import CaptureTarget

_NOWHERE = Environment(device="", torch="", triton="", cuda="", driver="", graphkit="")
_ADVICE = "If the change is meant, write the lock file anew with --lock."
_MOST_WORDS = 6


def graphs_to_lock(target: CaptureTarget, runner: Runner[Any]) -> list[GraphRecord]:
    """The graphs of a captured runner without what a second capture makes otherwise."""
    if runner.eager_reason:
        return []
    names = runner.memory_names(target.weights)
    attribution = Attribution(target.weights, stack_fill=UNSET_MARKER)
    with runner.captured_aside(attribution=attribution) as again:
        others = {size: inspect_graph(graph, names=names) for size, graph in again.items()}
    return [
        _settled(runner.inspect(size, weights=target.weights), others[size])
        for size in runner.table
    ]


def lock_of(target: str, graphs: Sequence[GraphRecord], environment: Environment) -> LockRecord:
    """A lock of a target's graphs; ``target`` is its name."""
    kept = tuple(_locked(graph) for graph in graphs)
    return LockRecord(
        target=target,
        environment=environment,
        fingerprints={graph.name: fingerprint(graph) for graph in kept},
        graphs=kept,
    )


def fingerprint(graph: GraphRecord) -> str:
    """A hash of a graph's kernels, launches, edges and arguments, 16 hex digits."""
    plain = replace(_locked(graph), environment=_NOWHERE)
    return hashlib.blake2b(plain.to_json().encode(), digest_size=8).hexdigest()


def check_lock(lock: LockRecord, now: LockRecord, log: AuditLog) -> None:
    """Say in words what changed since a lock was made."""
    before = {graph.name: graph for graph in lock.graphs}
    for graph in now.graphs:
        with log.check("lock", graph.mode, graph.batch_size) as check:
            locked = before.pop(graph.name, None)
            if locked is None:
                check.text = "not in the lock file"
                check.report(
                    "graph is new", f"{graph.name} is not in the lock file.", advice=_ADVICE
                )
            elif lock.fingerprints.get(graph.name) == now.fingerprints[graph.name]:
                check.text = f"as locked: {now.fingerprints[graph.name]}"
            else:
                words = diff_graphs(locked, graph).words
                check.text = f"changed: {now.fingerprints[graph.name]}"
                check.report("graph changed", _sentence(graph.name, words), advice=_ADVICE)
    for name, graph in before.items():
        with log.check("lock", graph.mode, graph.batch_size) as check:
            check.text = "not captured any more"
            check.report("graph is gone", f"{name} was not captured any more.", advice=_ADVICE)


def _settled(graph: GraphRecord, other: GraphRecord) -> GraphRecord:
    """A graph, its arguments that another capture has otherwise left out."""
    if len(graph.nodes) != len(other.nodes):
        return graph
    nodes = tuple(
        replace(node, arguments=tuple(map(_agreed, node.arguments, twin.arguments)))
        for node, twin in zip(graph.nodes, other.nodes, strict=True)
    )
    return replace(graph, nodes=nodes)


def _agreed(argument: Argument, other: Argument) -> Argument:
    same = argument.kind != "number" or argument.text == other.text
    return argument if same else replace(argument, text="unset")


def _sentence(name: str, words: Sequence[str]) -> str:
    more = len(words) - _MOST_WORDS
    told = "; ".join(words[:_MOST_WORDS]) + (f"; and {more} more changes" if more > 0 else "")
    return f"{name}: {told}."


def _locked(graph: GraphRecord) -> GraphRecord:
    nodes = tuple(_locked_node(node) for node in graph.nodes)
    return replace(graph, nodes=nodes, timing=None, memory=None, captured_at="")


def _locked_node(node: Node) -> Node:
    arguments = tuple(_locked_argument(argument) for argument in node.arguments)
    return replace(node, arguments=arguments, source="", duration_us=None, start_us=None)


def _locked_argument(argument: Argument) -> Argument:
    """An argument by its value, or by the kind of memory it leads to; a struct by its size."""
    pointers = tuple(
        Pointer(address=0, memory=pointer.memory, name=_lasting(pointer))
        for pointer in argument.pointers
    )
    if argument.kind in ("pointer", "tensor"):
        text = argument.text if argument.kind == "tensor" else pointers[0].name
        return replace(argument, text=text, pointers=pointers)
    if argument.kind == "struct" or argument.size < 4:
        return replace(argument, text=f"{argument.size} bytes", pointers=())
    return argument


def _lasting(pointer: Pointer) -> str:
    """A name that the next run will give as well."""
    declared = pointer.memory in ("weight", "state", "input", "mailbox")
    return pointer.name if declared else pointer.memory
