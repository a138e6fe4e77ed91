"""Branches of a graph that ran side by side in a replay."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from graphkit.records import GraphRecord, Node


def branches_of(record: GraphRecord) -> list[int | None]:
    """Return the branch of each node, from 0; ``None`` for a node whose time was not measured.

    A node continues the branch of a node that it waits for. If another node continues that branch
    already, it takes the first one that is idle when it starts. Nodes of one branch may overlap:
    the target of a programmatic edge starts early, and starts and durations are medians of
    several replays, so that up to half of the shorter node is no sign of two branches.
    """
    waits_for: dict[int, set[int]] = defaultdict(set)
    for edge in record.edges:
        waits_for[edge.target].add(edge.source)
    found: dict[int, int] = {}
    last: list[Node] = []
    for node in record.timeline.nodes:
        branch = _branch(node, last, waits_for[node.index])
        last[branch : branch + 1] = [node]
        found[node.index] = branch
    return [found.get(node.index) for node in record.nodes]


def _branch(node: Node, last: Sequence[Node], sources: set[int]) -> int:
    """Return the branch of a node after the last nodes of the branches so far."""
    continued = (place for place, before in enumerate(last) if before.index in sources)
    idle = (place for place, before in enumerate(last) if _is_over(before, node))
    return next(continued, next(idle, len(last)))


def _is_over(before: Node, node: Node) -> bool:
    shorter = min(before.duration_us or 0.0, node.duration_us or 0.0)
    return before.end_us - (node.start_us or 0.0) <= shorter / 2
