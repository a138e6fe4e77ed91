"""Search for memory of a graph pool that a replay reads before it writes it.

Between replays such memory keeps what an earlier replay or the host left in it, so that replays
are right until something else is there: after a sleep and a wake-up, a weight update, or a replay
of another graph. The pool is overwritten between two replays. If their results differ, the search
finds the bytes and the node that reads them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from graphkit.audit.audit_log import Check, argument_text
from graphkit.audit.finding_kinds import FindingKind
from graphkit.audit.node_switches import bisected
from graphkit.audit.replayable_graph import Effect, ReplayableGraph
from graphkit.audit.stale_memory.pool_memory import FILLS, Poison, Range, ranges_to_fill, without
from graphkit.graphs import Allocation
from graphkit.graphs.walk.timing import execution_order
from graphkit.records import Node

_StaleRead = tuple[Range, Effect, Node | None]
"""A read of pool memory that nothing in the graph wrote before: the first unit that is read, or all
that was overwritten if time was up; what its contents change; and the node that depends on it,
where nodes can be left out."""


def search_stale_memory(graph: ReplayableGraph, check: Check, most: int, advice: str) -> int | None:
    """Report every read of stale memory that is found.

    Returns:
        The number of bytes that were overwritten; ``None`` if replays do not repeat themselves.
    """
    tested = 0
    for fill in FILLS:
        own, others = graph.allocations, graph.pool_allocations
        ranges = ranges_to_fill(fill, graph.memory.blocks, graph.kept, own, others)
        tested = max(tested, sum(end - begin for begin, end in ranges))
        poison = Poison(fill, ranges)
        while poison.ranges and len(check.findings) < most:
            effect = graph.effect(poison)
            if effect is None:
                break
            read = _first_read(graph, poison, effect)
            if read is None:
                return None
            graph.kept.append(_report(graph, check, read, fill.text, advice))
            poison = replace(poison, ranges=tuple(without(poison.ranges, graph.kept)))
    return tested


def _first_read(graph: ReplayableGraph, poison: Poison, effect: Effect) -> _StaleRead | None:
    """Return the read of the lowest address, by bisection over the units that are overwritten.

    ``None`` if repeated replays do not agree.
    """

    def differ(units: int) -> bool:
        if time.perf_counter() > graph.deadline:
            raise TimeoutError
        return graph.effect(poison.first(units)) is not None

    try:
        unit = bisected(differ, poison.units)
        if unit is None or differ(unit):
            return None
    except TimeoutError:
        return (poison.ranges[0][0], poison.ranges[-1][1]), effect, None
    last = graph.effect(poison.first(unit + 1))
    if last is None:
        return None
    return poison.unit(unit), last, graph.first_dependent(poison, unit)


def _report(
    graph: ReplayableGraph, check: Check, read: _StaleRead, content: str, advice: str
) -> Range:
    """Report a read, and return the range of the memory that it reads from."""
    (address, end), effect, dependent = read
    block = graph.memory.block_at(address)
    allocation = _allocation_at(graph, address, is_live=block.is_live)
    name = graph.name_at(address) if block.is_live else ""
    node = dependent or first_pointing(graph.record.nodes, (block.begin, end))
    argument = None if node is None else nearest_argument(node, (block.begin, end))[1]
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
        f"{reader} reads memory of the graph pool before any node writes it{memory}. With "
        f"{content} there, {effect.text}.",
        node=node,
        argument=argument,
        names=(name,) if name else (),
        cause="; ".join((line or name, *((node.module, node.source) if node else ()))),
        advice=advice,
        **effect.facts,
    )
    return (address, end) if allocation is None else (allocation.begin, allocation.end)


def _allocation_at(graph: ReplayableGraph, address: int, *, is_live: bool) -> Allocation | None:
    """Return what allocated memory that a replay reads before it writes it, if it is known.

    A tensor that holds the memory was allocated there last, by any graph. Otherwise the memory is
    an uninitialised tensor of the graph itself.
    """
    allocations = [*reversed(graph.pool_allocations)] if is_live else graph.allocations
    allocated = (
        allocation
        for allocation in allocations
        if allocation.begin <= address < allocation.end
        and (is_live or not allocation.is_initialised)
    )
    return next(allocated, None)


def first_pointing(nodes: Sequence[Node], around: Range) -> Node | None:
    """Return the first node with an argument that points to the tensor at the end of a range."""
    pointing = [node for node in execution_order(nodes) if nearest_argument(node, around)[0]]
    return max(pointing, key=lambda node: nearest_argument(node, around)[0], default=None)


def nearest_argument(node: Node, around: Range) -> tuple[int, int | None]:
    """Return the last address in a range that a node's arguments point to, and that argument.

    The address is 0 if none points there.
    """
    begin, end = around
    inside = [
        (pointer.address, index)
        for index, argument in enumerate(node.arguments)
        if not argument.name.startswith("->")  # a result of a recorded operation
        for pointer in argument.pointers
        if begin <= pointer.address < end
    ]
    return max(inside, default=(0, None), key=lambda place: place[0])
