"""The node of a replay that faults.

A fault, such as an illegal access, ends the CUDA context of its process, and shows at a later call
only. It is therefore searched in new processes: one waits for every replay, so that the fault is
assigned to its replay. The next one runs the nodes of that replay one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from graphkit.audit.audit_log import Check, NotChecked
from graphkit.audit.finding_kinds import FindingKind
from graphkit.audit.foreign.audits.followed_graph import FollowedGraph
from graphkit.audit.node_switches import SWITCHABLE
from graphkit.graphs.walk.timing import execution_order
from graphkit.records import Node, count_of, listed

FIND_ADVICE = "Run graphkit record --audit --find-fault to name the graph, its replay and node."
_SHOWN = 6


def report_fault(text: str, error: str, check: Check, advice: str = FIND_ADVICE) -> None:
    """Report that CUDA failed."""
    check.text = f"CUDA failed: {error}"
    check.report(FindingKind.FAULT, f"{text}: {error}.", advice=advice, cause=error)


def replay_by_node(
    device: Any, followed: FollowedGraph, graph: Any, replay: Callable[[], object], check: Check
) -> bool:
    """Run the nodes of a replay one after the other, and report the first one that faults.

    Returns:
        Whether a node faulted. The process can then not use the device any more.
    """
    nodes = followed.record.nodes
    try:
        switched = device.node_switches(graph, nodes)
    except NotChecked as reason:
        replay()
        error = device.fault()
        if error:
            number = followed.replays
            what = f"replay {number} failed; its nodes did not run one by one, because {reason}"
            report_fault(what, error, check, FindingKind.FAULT.advice)
        return bool(error)
    order = [node for node in execution_order(nodes) if node.kind in SWITCHABLE]
    for node in order:
        switched.keep_only([node.index])
        replay()
        error = device.fault()
        if error:
            _report_node(followed, node, error, check)
            return True
    switched.keep_first(len(nodes))
    check.text = f"{count_of(len(order), 'node')} ran one by one without a fault"
    return False


def _report_node(followed: FollowedGraph, node: Node, error: str, check: Check) -> None:
    arguments = (
        f"{argument.name or index} = {argument.text}"
        for index, argument in enumerate(node.arguments)
    )
    shown = listed(arguments, _SHOWN) or "none"
    names = (
        followed.memories[pointer.address].name
        for argument in node.arguments
        for pointer in argument.pointers
        if pointer.address in followed.memories
    )
    check.text = f"node {node.index} failed: {error}"
    check.report(
        FindingKind.FAULT,
        f"`{node.short_name}` (node {node.index}) failed in replay {followed.replays}: {error}. "
        f"Grid {list(node.grid)}, block {list(node.block)}; arguments: {shown}.",
        node=node,
        names=tuple(dict.fromkeys(names)),
        cause=error,
    )
