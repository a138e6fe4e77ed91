"""Find the differences between captures that a change of the host causes.

A difference counts only if it shows again with the two captures in the other order, and with other
contents of the bytes that torch leaves unset, which may hold anything, even traces of the change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from graphkit.audit.baked.host_changes import HostChange
from graphkit.audit.baked.recaptures import Baseline, Recaptures
from graphkit.audit.unset_bytes import may_be_unset
from graphkit.graphs import UNSET_MARKER
from graphkit.graphs.walk.capture_differences import CaptureDifference
from graphkit.records import Node

DifferencesBySize = Mapping[int, Sequence[CaptureDifference]]
_CONFIRMATIONS = ((UNSET_MARKER, False), (0, True), (UNSET_MARKER, True))
"""Fill of the stack, and whether the changed capture comes first, of each repetition."""


def confirmed_differences(
    recaptures: Recaptures, baseline: Baseline, change: HostChange
) -> DifferencesBySize:
    """Return the differences that a change causes at each size, and undo the change."""
    try:
        found: DifferencesBySize = baseline.differences(
            baseline.nodes, recaptures.canonical_nodes(change.apply())
        )
        for stack_fill, changed_first in _CONFIRMATIONS:
            if recaptures.on_any_rank(any(found.values())):
                again = _compare_again(recaptures, baseline, change, stack_fill, changed_first)
                found = {
                    size: [each for each in found[size] if each in again[size]] for size in found
                }
        return _without_unset_bytes(found, recaptures, baseline, change)
    finally:
        change.undo()


def _compare_again(
    recaptures: Recaptures,
    baseline: Baseline,
    change: HostChange,
    stack_fill: int,
    changed_first: bool,
) -> DifferencesBySize:
    captures = {}
    for is_changed in (changed_first, not changed_first):
        change.undo()
        batch_of = change.apply() if is_changed else recaptures.batch_of(seed=1)
        captures[is_changed] = recaptures.canonical_nodes(batch_of, stack_fill)
    return baseline.differences(captures[False], captures[True])


def _without_unset_bytes(
    found: DifferencesBySize, recaptures: Recaptures, baseline: Baseline, change: HostChange
) -> DifferencesBySize:
    """Drop differences in bytes that may be unset, if replays of the captures are equal."""
    certain = {
        size: [each for each in differences if not _may_be_unset(each, baseline.records[size])]
        for size, differences in found.items()
    }
    if not recaptures.on_any_rank(certain != found):
        return found
    with recaptures.captured(change.apply()) as graphs:
        return certain if recaptures.compare_replays(graphs) == "equal" else found


def _may_be_unset(difference: CaptureDifference, nodes: Sequence[Node]) -> bool:
    if difference.argument is None or difference.offset is None:
        return False
    node = nodes[difference.node]
    return may_be_unset(node, node.arguments[difference.argument], difference.offset)
