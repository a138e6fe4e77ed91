"""Which differences a change surely made.

What shows once must show again, whichever of the two is captured first and whatever torch's unset
bytes hold: those may hold anything, the change's own traces included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from graphkit.audit.baked.host_changes import HostChange
from graphkit.audit.baked.recaptures import Baseline, Recaptures
from graphkit.audit.unset_bytes import may_be_unset
from graphkit.graphs import UNSET_MARKER
from graphkit.graphs.walk.capture_differences import CaptureDifference
from graphkit.records import Node

Found = Mapping[int, Sequence[CaptureDifference]]
"""The differences of each size."""
_ROUNDS = ((UNSET_MARKER, False), (0, True), (UNSET_MARKER, True))
"""To look for it again: what unset bytes hold, and whether the change is captured first."""


def what_changes(recaptures: Recaptures, baseline: Baseline, change: HostChange) -> Found:
    """What a change changes in each size."""
    try:
        found: Found = baseline.differences(baseline.images, recaptures.images(change.make()))
        for unset, changed_first in _ROUNDS:
            if any(found.values()):
                again = _once_more(recaptures, baseline, change, unset, changed_first)
                found = {
                    size: [each for each in found[size] if each in again[size]] for size in found
                }
        return _without_leftovers(found, recaptures, baseline, change)
    finally:
        change.undo()


def _once_more(
    recaptures: Recaptures, baseline: Baseline, change: HostChange, unset: int, changed_first: bool
) -> Found:
    both = {}
    for is_changed in (changed_first, not changed_first):
        change.undo()
        batch_of = change.make() if is_changed else recaptures.batch_of(seed=1)
        both[is_changed] = recaptures.images(batch_of, unset)
    return baseline.differences(both[False], both[True])


def _without_leftovers(
    found: Found, recaptures: Recaptures, baseline: Baseline, change: HostChange
) -> Found:
    """Leave out what stands where bytes may be unset, if no replay shows a difference."""
    known = {
        size: [each for each in those if not _is_doubtful(each, baseline.nodes[size])]
        for size, those in found.items()
    }
    if known == found:
        return found
    with recaptures.captured(change.make()) as graphs:
        return known if recaptures.verdict(graphs) == "alike" else found


def _is_doubtful(difference: CaptureDifference, nodes: Sequence[Node]) -> bool:
    if difference.argument is None or difference.offset is None:
        return False
    node = nodes[difference.node]
    return may_be_unset(node, node.arguments[difference.argument], difference.offset)
