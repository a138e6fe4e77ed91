"""Which host values a graph froze.

A graph is captured twice with everything equal: no difference certifies that capturing it is
deterministic. Then one thing that the host may change is changed at a time, and what differs in
the graph was baked into it. (Idea and feasibility: nobody else does this; two captures that differ
in one scalar differ in exactly that argument.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from graphkit.audit.ledger import Ledger, Look
from graphkit.graphs import OTHER_UNSET, Attribution
from graphkit.graphs.walk.images import (
    Difference,
    NodeImage,
    Unset,
    differences,
    image_of,
    unset_bytes,
)
from graphkit.graphs.walk.inspect import inspect_graph
from graphkit.records import Node
from graphkit.runners import Runner
from graphkit.targets import CaptureTarget

Images = Mapping[int, Sequence[NodeImage]]
"""The image of each captured size."""


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
    """
    for setter, values in target.dynamic.values():
        setter(values[0])
    capturing = _Capturing(target, runner)
    with ledger.look("baked", runner.mode.name) as look:
        before = _certified(capturing, look)
    for change in _changes(target, runner, capturing):
        with ledger.look("baked", runner.mode.name) as look:
            found = _found(capturing, before, change)
            for size, each in found.items():
                _tell(look, change, each, size, before.nodes[size])
            told = _counted(sum(map(len, found.values())), before.images)
            look.text = f"changed {change.name}: {told}"


@dataclass(frozen=True, slots=True)
class _Baseline:
    """What graphs look like when nothing was changed.

    Attributes:
        images: Of each size.
        nodes: The same as nodes, to tell where a difference is.
        unset: Bytes that mean nothing.
    """

    images: Images
    nodes: Mapping[int, Sequence[Node]]
    unset: Mapping[int, Unset]

    def differences(self, before: Images, after: Images) -> dict[int, list[Difference]]:
        """Where graphs differ in bytes that mean something."""
        return {
            size: list(differences(image, after[size], self.unset[size]))
            for size, image in before.items()
        }


class _Capturing:
    """Captures a runner's graphs aside, and reads them."""

    def __init__(self, target: CaptureTarget, runner: Runner[Any]) -> None:
        self._target, self._runner = target, runner
        self._names = runner.memory_names(target.weights)
        self.nodes: dict[int, tuple[Node, ...]] = {}
        """The nodes of the last capture, to tell a finding's place."""

    def batch_of(self, seed: int, live: int | None = None) -> Callable[[int], Any]:
        """Makes the batch of each size, with so many live requests if that is given."""
        return lambda size: self._target.batch(self._runner.mode, min(live or size, size), seed)

    def images(self, batch_of: Callable[[int], Any], unset: int = 0) -> Images:
        """Capture every size with these batches in the inputs.

        Args:
            batch_of: Makes the batch of each size.
            unset: What the unset bytes of arguments hold, see ``Attribution``.
        """
        attribution = Attribution(self._target.weights)
        attribution.unset = unset
        with self._runner.captured_aside(batch_of, attribution=attribution) as graphs:
            made = {size: image_of(graph, self._names) for size, graph in graphs.items()}
            self.nodes = {
                size: inspect_graph(graph, names=self._names).nodes
                for size, graph in graphs.items()
            }
        return dict(sorted(made.items()))


def _changes(target: CaptureTarget, runner: Runner[Any], capturing: _Capturing) -> Iterator[Change]:
    yield Change("batch contents", "one batch", "another", lambda: capturing.batch_of(2), _nothing)
    if runner.table.largest > 1:
        few = capturing.batch_of(1, live=1)
        yield Change("live requests", "all", "1", lambda: few, _nothing)
    for name, (setter, values) in target.dynamic.items():
        for value in values[1:]:
            yield _declared(name, setter, values[0], value, capturing)


def _declared(
    name: str, setter: Callable[[Any], None], before: Any, after: Any, capturing: _Capturing
) -> Change:
    def make() -> Callable[[int], Any]:
        setter(after)
        return capturing.batch_of(seed=1)

    return Change(name, repr(before), repr(after), make, lambda: setter(before))


def _nothing() -> None:
    pass


def _certified(capturing: _Capturing, look: Look) -> _Baseline:
    """Capture twice with everything equal, and once with other bytes where torch sets none."""
    plain = capturing.batch_of(seed=1)
    first, nodes = capturing.images(plain), capturing.nodes
    again, other = capturing.images(plain), capturing.images(plain, OTHER_UNSET)
    unset = {size: unset_bytes(first[size], again[size], other[size]) for size in first}
    baseline = _Baseline(first, nodes, unset)
    found = baseline.differences(first, again)
    look.text = f"captured again: {_counted(sum(map(len, found.values())), first)}"
    passed_over = sum(len(each) for by_place in unset.values() for each in by_place.values())
    if passed_over:
        look.text += f"; {passed_over} bytes that torch leaves unset are passed over"
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


def _found(capturing: _Capturing, before: _Baseline, change: Change) -> dict[int, list[Difference]]:
    """What a change changes in each size.

    What a first capture shows must show again, with other bytes where torch sets none: those may
    hold anything, the change's own traces included.
    """
    try:
        found = before.differences(before.images, capturing.images(change.make()))
        if not any(found.values()):
            return found
        change.undo()
        plain = capturing.images(capturing.batch_of(seed=1), OTHER_UNSET)
        sure = before.differences(plain, capturing.images(change.make(), OTHER_UNSET))
    finally:
        change.undo()
    return {size: [each for each in found[size] if each in sure[size]] for size in found}


def _counted(number: int, images: Images) -> str:
    nodes = sum(map(len, images.values()))
    return f"{number} differences in {nodes} nodes of {len(images)} graphs"


def _tell(
    look: Look, change: Change, found: Sequence[Difference], size: int, nodes: Sequence[Node]
) -> None:
    """One finding for what is the same in many nodes: a baked value often stands in every layer."""
    alike: dict[Any, list[Difference]] = {}
    for each in found:
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


def _place(difference: Difference) -> str:
    if difference.argument is None:
        return difference.what
    offset = f" at byte {difference.offset}" if difference.offset else ""
    return f"argument {difference.argument}{offset}"
