"""Findings about stale pool memory."""

from __future__ import annotations

from collections.abc import Sequence

from graphkit.audit.audit_log import Check
from graphkit.audit.finding_text import argument_text
from graphkit.audit.pool_poison.stale_reads import StaleRead
from graphkit.graphs import Allocation
from graphkit.records import distinct_text

_ADVICE = (
    "Write the memory in the forward before it is read, for example with zeros instead of empty, "
    "or allocate and fill it before the capture. Declare memory that the host fills on purpose as "
    "kept_memory, and fill it again after a sleep and a wake-up."
)


def report_stale_read(
    check: Check, read: StaleRead, name: str, allocation: Allocation | None
) -> None:
    """Report a read of pool memory before it is written.

    Args:
        check: Receives the finding.
        read: The read.
        name: Where a live Python object holds the memory; empty if none does.
        allocation: What allocated it during the capture, if it is known.
    """
    memory = f": `{name}`" if name else ""
    if allocation is not None:
        op = allocation.op.split("::")[-1].split(".")[0]
        line = f" at {allocation.source}" if allocation.source else ""
        memory += f"{',' if name else ': memory'} allocated by `{op}`{line}"
    node, mismatch = read.node, read.effect.mismatch
    reader = "a node, whose arguments do not point there,"
    if node is not None:
        reader = f"`{node.short_name}` (node {node.index})"
        if read.argument is not None:
            reader = argument_text(node, read.argument)
    facts = {}
    if mismatch is not None:
        before, after = distinct_text(mismatch.expected, mismatch.got)
        facts = {
            "row": mismatch.row, "request": mismatch.request, "before": before, "after": after,
        }  # fmt: skip
    line = allocation.source if allocation is not None else ""
    check.report(
        "stale pool memory",
        f"{reader} reads memory of the graph pool before any node writes it{memory}. With "
        f"{read.fill.text} there, {read.effect.text}.",
        node=node,
        argument=read.argument,
        field=read.effect.field,
        names=(name,) if name else (),
        cause="; ".join((line or name, *((node.module, node.source) if node else ()))),
        advice=_ADVICE,
        **facts,
    )


def allocation_at(
    address: int, is_live: bool, own: Sequence[Allocation], others: Sequence[Allocation]
) -> Allocation | None:
    """Return what allocated memory that a replay reads before it writes it, if it is known.

    Args:
        address: An address in the memory.
        is_live: Whether a tensor holds the memory, which was then allocated last.
        own: Allocations of the captures of the graph that reads.
        others: Those of all graphs, in the order of their captures.
    """
    if is_live:
        return next((each for each in reversed(others) if each.begin <= address < each.end), None)
    unset = (each for each in own if not each.is_initialised)
    return next((each for each in unset if each.begin <= address < each.end), None)
