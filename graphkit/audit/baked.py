"""Which host values a graph froze.

A graph is captured twice with everything equal: no difference certifies that capturing it is
deterministic. Then one thing that the host may change is changed at a time, and what differs in
the graph was baked into it. (Idea and feasibility: nobody else does this; two captures that differ
in one scalar differ in exactly that argument.)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from graphkit.audit.ledger import Ledger, Look
from graphkit.audit.leftovers import may_be_left_over
from graphkit.audit.recaptures import Baseline, Recaptures
from graphkit.errors import TargetError
from graphkit.graphs import OTHER_UNSET
from graphkit.graphs.walk.images import Difference
from graphkit.records import Node
from graphkit.runners import Runner
from graphkit.targets import CaptureTarget

Found = Mapping[int, Sequence[Difference]]
"""The differences of each size."""
_ROUNDS = ((OTHER_UNSET, False), (0, True), (OTHER_UNSET, True))
"""To look for it again: what unset bytes hold, and whether the change is captured first."""


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that the host may change between two replays.

    Attributes:
        name: What it is.
        before, after: Its values, for people.
        make: Makes the change, and gives the batch of a size that captures then see.
        undo: Takes it back.
    """

    name: str
    before: str
    after: str
    make: Callable[[], Callable[[int], Any]]
    undo: Callable[[], None]


def audit_baked(target: CaptureTarget, runner: Runner[Any], ledger: Ledger) -> None:
    """Look for host values that a runner's graphs froze.

    Args:
        target: Says what may change: its sample batches, and ``dynamic``.
        runner: One of the target's, planned or captured; nothing may be replayed meanwhile.
        ledger: Takes what is found.

    Raises:
        CaptureError: The forward cannot be captured.
        TargetError: Something in ``dynamic`` has fewer than two values.
    """
    for name, (setter, values) in target.dynamic.items():
        if len(values) < 2:
            raise TargetError(
                f"target {target.name!r}: dynamic {name!r} has {len(values)} values, so there is "
                "no change to look at. Give it two or more."
            )
        setter(values[0])
    recaptures = Recaptures(target, runner)
    with recaptures.kept():
        with ledger.look("baked", runner.mode.name) as look:
            baseline = _certified(recaptures, look)
        for change in _changes(target, runner, recaptures):
            with ledger.look("baked", runner.mode.name) as look:
                found = _found(recaptures, baseline, change)
                for size, each in found.items():
                    _tell(look, change, each, size, baseline.nodes[size])
                look.text = f"changed {change.name}: {_counted(found, baseline)}"


def _changes(
    target: CaptureTarget, runner: Runner[Any], recaptures: Recaptures
) -> Iterator[Change]:
    yield Change("batch contents", "one batch", "another", lambda: recaptures.batch_of(2), _nothing)
    if runner.table.largest > 1:
        few = recaptures.batch_of(1, live=1)
        yield Change("live requests", "all", "1", lambda: few, _nothing)
    for name, (setter, values) in target.dynamic.items():
        for value in values[1:]:
            yield _declared(name, setter, values[0], value, recaptures)


def _declared(
    name: str, setter: Callable[[Any], None], before: Any, after: Any, recaptures: Recaptures
) -> Change:
    def make() -> Callable[[int], Any]:
        setter(after)
        return recaptures.batch_of(seed=1)

    return Change(name, _shown(before), _shown(after), make, lambda: setter(before))


def _shown(value: Any) -> str:
    """A value in one line, without its address: reports are the same from run to run."""
    return " ".join(re.sub(r" at 0x[0-9a-f]+", "", repr(value)).split())


def _nothing() -> None:
    pass


def _certified(recaptures: Recaptures, look: Look) -> Baseline:
    """Capture twice with everything equal, and say where the two differ."""
    baseline, again = recaptures.baseline()
    found = baseline.differences(baseline.images, again)
    look.text = f"captured again: {_counted(found, baseline)}"
    if any(baseline.unset.values()):
        look.text += "; bytes that torch leaves unset are passed over"
    for size, each in found.items():
        if each:
            look.found(
                "capture is not deterministic",
                f"two captures with everything equal differ in {len(each)} places, first in "
                f"node {each[0].node}: {each[0].what} {each[0].before} and {each[0].after}.",
                batch_size=size,
                advice="Look for random numbers, time, or counters that the forward reads on "
                "the host.",
                before=each[0].before,
                after=each[0].after,
            )
    return baseline


def _found(recaptures: Recaptures, baseline: Baseline, change: Change) -> Found:
    """What a change changes in each size.

    What shows once must show again, whichever of the two is captured first and whatever torch's
    unset bytes hold: those may hold anything, the change's own traces included.
    """
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
    recaptures: Recaptures, baseline: Baseline, change: Change, unset: int, changed_first: bool
) -> Found:
    both = {}
    for is_changed in (changed_first, not changed_first):
        change.undo()
        batch_of = change.make() if is_changed else recaptures.batch_of(seed=1)
        both[is_changed] = recaptures.images(batch_of, unset)
    return baseline.differences(both[False], both[True])


def _without_leftovers(
    found: Found, recaptures: Recaptures, baseline: Baseline, change: Change
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


def _is_doubtful(difference: Difference, nodes: Sequence[Node]) -> bool:
    if difference.argument is None or difference.offset is None:
        return False
    node = nodes[difference.node]
    return may_be_left_over(node, node.arguments[difference.argument], difference.offset)


def _counted(found: Found, baseline: Baseline) -> str:
    number, nodes = (sum(map(len, each.values())) for each in (found, baseline.images))
    return f"{number} differences in {nodes} nodes of {len(found)} graphs"


def _tell(
    look: Look, change: Change, found: Sequence[Difference], size: int, nodes: Sequence[Node]
) -> None:
    """One finding for what is the same in many nodes: a baked value often stands in every layer."""
    alike: dict[Any, list[Difference]] = {}
    for each in _before_another_way(found):
        kernel = nodes[each.node].short_name if each.node < len(nodes) else ""
        facts = each.what, each.argument, each.offset, each.before, each.after
        alike.setdefault((kernel, *facts), []).append(each)
    for (kernel, *_), places in alike.items():
        first = places[0]
        more = f", and the same in {len(places) - 1} more nodes" if len(places) > 1 else ""
        look.found(
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


def _before_another_way(found: Sequence[Difference]) -> Iterator[Difference]:
    """Differences up to the first node that is another one, if their numbers differ.

    Behind a node that only one capture has, nodes of different places are compared.
    """
    is_longer = any(each.what == "number of nodes" for each in found)
    for each in found:
        yield each
        if is_longer and each.what == "kernel":
            return


def _place(difference: Difference) -> str:
    if difference.argument is None:
        return difference.what
    offset = f" at byte {difference.offset}" if difference.offset else ""
    return f"argument {difference.argument}{offset}"
