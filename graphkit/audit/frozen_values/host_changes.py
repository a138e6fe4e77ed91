"""Changes that the host may make between two replays, and what they change in captured graphs.

A difference counts only if it shows again with the two captures in the other order, and with other
contents of the bytes that torch leaves unset, which may hold anything, even traces of the change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from graphkit.audit.capture_differences import CaptureDifference
from graphkit.audit.frozen_values.recaptures import Baseline, DrawBatch, Recaptures
from graphkit.audit.frozen_values.undeclared import changed_names
from graphkit.audit.replayable_graph import is_optional_pointer
from graphkit.errors import TargetError
from graphkit.graphs import UNSET_MARKER
from graphkit.graphs.walk.recorder_walk import repr_without_address
from graphkit.records import Node, count_of
from graphkit.runners import Runner
from graphkit.runners.targets import CaptureTarget

DifferencesBySize = Mapping[int, Sequence[CaptureDifference]]
_CONFIRMATIONS = ((UNSET_MARKER, False), (0, True), (UNSET_MARKER, True))
"""Fill of the stack, and whether the changed capture comes first, of each repetition."""


@dataclass(frozen=True, slots=True)
class HostChange:
    """One change that the host may make between two replays.

    Attributes:
        name: What changes, for summaries.
        subject: The same as the object of a sentence.
        before, after: Text of the two values.
        apply: Makes the change, and returns the function that draws the batch of each size.
        undo: Reverts the change.
        paths: Numbers, lists and sets of the forward that it changes.
    """

    name: str
    subject: str
    before: str
    after: str
    apply: Callable[[], DrawBatch]
    undo: Callable[[], object]
    paths: tuple[str, ...] = ()


def set_first_values(target: CaptureTarget) -> None:
    """Set every declared host value to its first value.

    Raises:
        TargetError: A host value has fewer than two values.
    """
    for name, (setter, values) in target.host_values.items():
        if len(values) < 2:
            raise TargetError(
                f"target {target.name!r}: host value {name!r} has "
                f"{count_of(len(values), 'value')}, so there is nothing to compare. Give it two "
                "or more."
            )
        setter(values[0])


def host_changes(
    target: CaptureTarget, runner: Runner[Any, Any], recaptures: Recaptures
) -> Iterator[HostChange]:
    """Yield another batch, fewer live requests, and each declared value after the first."""
    yield HostChange(
        name="batch contents",
        subject="the batch contents",
        before="one batch",
        after="another",
        apply=lambda: recaptures.batches(seed=2),
        undo=lambda: None,
    )
    if runner.table.largest > 1:
        yield HostChange(
            name="live requests",
            subject="the number of live requests",
            before="a full batch",
            after="1 request",
            apply=lambda: recaptures.batches(seed=1, live=1),
            undo=lambda: None,
        )
    for name, (setter, values) in target.host_values.items():
        for value in values[1:]:
            paths = changed_names(target.forwards[runner.mode], setter, values[0], value)
            change = _declared_change(name, setter, values[0], value, recaptures)
            yield replace(change, paths=paths)


def _declared_change(
    name: str, setter: Callable[[Any], None], before: Any, after: Any, recaptures: Recaptures
) -> HostChange:
    def apply() -> DrawBatch:
        setter(after)
        return recaptures.batches(seed=1)

    return HostChange(
        name, f"`{name}`", _one_line(before), _one_line(after), apply, lambda: setter(before)
    )


def _one_line(value: Any) -> str:
    return " ".join(repr_without_address(value).split())


def confirmed_differences(
    recaptures: Recaptures, baseline: Baseline, change: HostChange
) -> DifferencesBySize:
    """Return the differences that a change causes at each size, and undo the change."""
    try:
        by_size: DifferencesBySize = baseline.differences(
            baseline.nodes, recaptures.canonical_nodes(change.apply())
        )
        for stack_fill, changed_first in _CONFIRMATIONS:
            if recaptures.on_any_rank(any(by_size.values())):
                again = _compare_again(recaptures, baseline, change, stack_fill, changed_first)
                by_size = {
                    size: [difference for difference in by_size[size] if difference in again[size]]
                    for size in by_size
                }
        return _without_unset_bytes(by_size, recaptures, baseline, change)
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
        draw = change.apply() if is_changed else recaptures.batches(seed=1)
        captures[is_changed] = recaptures.canonical_nodes(draw, stack_fill)
    return baseline.differences(captures[False], captures[True])


def _without_unset_bytes(
    by_size: DifferencesBySize, recaptures: Recaptures, baseline: Baseline, change: HostChange
) -> DifferencesBySize:
    """Drop differences in bytes that may be unset, if replays of the captures are equal."""
    certain = {
        size: [
            difference
            for difference in differences
            if not _is_optional(difference, baseline.records[size])
        ]
        for size, differences in by_size.items()
    }
    if not recaptures.on_any_rank(certain != by_size):
        return by_size
    with recaptures.captured(change.apply()) as graphs:
        return certain if recaptures.compare_replays(graphs) == "equal" else by_size


def _is_optional(difference: CaptureDifference, nodes: Sequence[Node]) -> bool:
    if difference.argument is None or difference.offset is None:
        return False
    node = nodes[difference.node]
    return is_optional_pointer(node, node.arguments[difference.argument], difference.offset)
