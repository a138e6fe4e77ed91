"""What was found, in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from graphkit.audit.audit_log import Check
from graphkit.audit.baked.confirmed_differences import Found
from graphkit.audit.baked.host_changes import HostChange
from graphkit.audit.baked.recaptures import Baseline
from graphkit.graphs.walk.capture_differences import CaptureDifference
from graphkit.records import Node


def counted(found: Found, baseline: Baseline) -> str:
    """How many differences there are, in how much."""
    number, nodes = (sum(map(len, each.values())) for each in (found, baseline.images))
    return f"{number} differences in {nodes} nodes of {len(found)} graphs"


def tell(
    check: Check,
    change: HostChange,
    found: Sequence[CaptureDifference],
    size: int,
    nodes: Sequence[Node],
) -> None:
    """One finding for what is the same in many nodes: a baked value often stands in every layer."""
    alike: dict[Any, list[CaptureDifference]] = {}
    for each in _before_another_way(found):
        kernel = nodes[each.node].short_name if each.node < len(nodes) else ""
        facts = each.what, each.argument, each.offset, each.before, each.after
        alike.setdefault((kernel, *facts), []).append(each)
    for (kernel, *_), places in alike.items():
        first = places[0]
        more = f", and the same in {len(places) - 1} more nodes" if len(places) > 1 else ""
        check.report(
            "baked value",
            f"{change.name} is baked into node {first.node}{f' ({kernel})' if kernel else ''}: "
            f"{_place(first)} is {first.before} at {change.before} and {first.after} at "
            f"{change.after}{more}.",
            node=nodes[first.node] if kernel else None,
            batch_size=size,
            argument=first.argument,
            offset=first.offset,
            before=first.before,
            after=first.after,
            advice="Read it from a tensor that every replay refreshes: declare it as an input "
            "field, or write it in place before each replay.",
        )


def _before_another_way(found: Sequence[CaptureDifference]) -> Iterator[CaptureDifference]:
    """Differences up to the first node that is another one, if their numbers differ.

    Behind a node that only one capture has, nodes of different places are compared.
    """
    is_longer = any(each.what == "number of nodes" for each in found)
    for each in found:
        yield each
        if is_longer and each.what == "kernel":
            return


def _place(difference: CaptureDifference) -> str:
    if difference.argument is None:
        return difference.what
    offset = f" at byte {difference.offset}" if difference.offset else ""
    return f"argument {difference.argument}{offset}"
