"""The bytes of the pool that a replay reads before it writes them, and the node that reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from graphkit.audit.node_switches import Incomparable, bisected, switches
from graphkit.audit.pool_poison.effects import Effect, PoisonedReplays
from graphkit.audit.pool_poison.ranges import Fill, Poison, Range
from graphkit.graphs.walk.node_order import execution_order
from graphkit.records import Node


@dataclass(frozen=True, slots=True)
class StaleRead:
    """A read of pool memory that nothing in the graph wrote before.

    Attributes:
        unit: Range of the first unit that is read.
        fill: Content that changed the replay.
        effect: The change.
        node: The node that reads it; ``None`` if it is unknown.
        argument: Argument of the node that points to it; ``None`` if none does.
    """

    unit: Range
    fill: Fill
    effect: Effect
    node: Node | None
    argument: int | None


def first_stale_read(
    replays: PoisonedReplays, nodes: Sequence[Node], poison: Poison
) -> StaleRead | None:
    """Return the read of the lowest address, by bisection over the units that are overwritten.

    Args:
        replays: Replays of the batch.
        nodes: Nodes of the graph.
        poison: An overwriting that changes the replay.

    Returns:
        The read; ``None`` if repeated replays do not agree.
    """
    unit = bisected(lambda units: replays.effect(poison.first(units)) is not None, poison.units)
    if unit is None or replays.effect(poison.first(unit)) is not None:
        return None
    effect = replays.effect(poison.first(unit + 1))
    if effect is None:
        return None
    span = poison.unit(unit)
    around = replays.memory.block_at(span[0]).begin, span[1]
    node = _first_dependent(replays, nodes, poison, unit) or _first_pointing(nodes, around)
    argument = None if node is None else _nearest_argument(node, around)[1]
    return StaleRead(span, poison.fill, effect, node, argument)


def _first_dependent(
    replays: PoisonedReplays, nodes: Sequence[Node], poison: Poison, unit: int
) -> Node | None:
    """Return the first node after which memory depends on a unit, by bisection over the nodes.

    Replays the first nodes with the units before it overwritten, and again with the unit as well.
    Returns ``None`` if nodes cannot be left out.
    """
    span, runner = poison.unit(unit), replays.runner
    graph, wait = runner.graphs[replays.size], runner.backend.wait_for_device
    try:
        with switches(graph, nodes, wait) as switched:

            def differ(count: int) -> bool:
                run = partial(switched.replay_first, count)
                before, after = (
                    replays.image(poison.first(units), run, span) for units in (unit, unit + 1)
                )
                return before != after

            index = bisected(differ, len(nodes))
    except Incomparable:
        return None
    return None if index is None else nodes[index]


def _first_pointing(nodes: Sequence[Node], around: Range) -> Node | None:
    """Return the first node with an argument that points to the tensor at the end of a range."""
    ordered = list(execution_order(nodes))
    nearest = max((_nearest_argument(node, around)[0] for node in ordered), default=0)
    found = (node for node in ordered if nearest and _nearest_argument(node, around)[0] == nearest)
    return next(found, None)


def _nearest_argument(node: Node, around: Range) -> tuple[int, int | None]:
    """Return the last address in a range that a node's arguments point to, and that argument.

    The address is 0 if none points there.
    """
    begin, end = around
    found = [
        (pointer.address, index)
        for index, argument in enumerate(node.arguments)
        if not argument.name.startswith("->")  # a result of a recorded operation
        for pointer in argument.pointers
        if begin <= pointer.address < end
    ]
    return max(found, default=(0, None), key=lambda found: found[0])
