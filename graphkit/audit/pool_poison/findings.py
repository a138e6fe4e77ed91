"""Findings of memory of a graph pool that a replay reads before it writes it."""

from __future__ import annotations

from typing import Any

from graphkit.audit.audit_log import Check
from graphkit.audit.finding_kinds import FindingKind
from graphkit.audit.places import argument_text
from graphkit.graphs import Allocation
from graphkit.records import Node


def report_stale_read(
    check: Check,
    node: Node | None,
    argument: int | None,
    allocation: Allocation | None,
    effect: str,
    *,
    name: str = "",
    **facts: Any,
) -> None:
    """Report a read of memory of the graph pool before it is written.

    Args:
        check: Receives the finding.
        node: The node that reads; ``None`` if it is unknown.
        argument: Its argument that points to the memory; ``None`` if none does.
        allocation: What allocated the memory during the capture, if it is known.
        effect: What other contents of the memory change, as a clause that begins with ``With``.
        name: Where a live Python object holds the memory; empty if none does.
        facts: Further attributes of the ``Finding``.
    """
    reader = "a node, whose arguments do not point there,"
    if node is not None:
        reader = f"`{node.short_name}` (node {node.index})"
        if argument is not None:
            reader = argument_text(node, argument)
    memory = f": `{name}`" if name else ""
    line = "" if allocation is None else allocation.source
    if allocation is not None:
        op = allocation.op.split("::")[-1].split(".")[0]
        memory += f"{',' if name else ': memory'} allocated by `{op}`{line and f' at {line}'}"
    check.report(
        FindingKind.STALE_POOL_MEMORY,
        f"{reader} reads memory of the graph pool before any node writes it{memory}. {effect}.",
        node=node,
        argument=argument,
        names=(name,) if name else (),
        cause="; ".join((line or name, *((node.module, node.source) if node else ()))),
        **facts,
    )
