"""Changes that the host may make between two replays, and findings of what graphs keep of them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from graphkit.audit.audit_log import Check
from graphkit.audit.capture_differences import (
    CaptureDifference,
    comparable,
    location,
    node_name,
)
from graphkit.audit.finding_kinds import FindingKind
from graphkit.audit.frozen_values.undeclared import Candidate, changed_names
from graphkit.audit.host_objects.host_numbers import HostNumber, value_text
from graphkit.audit.recaptures import Change, DifferencesBySize, DrawBatch
from graphkit.errors import TargetError
from graphkit.graphs.walk.recorder_walk import repr_without_address
from graphkit.records import Node, count_of
from graphkit.runners import Runner
from graphkit.runners.targets import CaptureTarget

_VALUE = (
    "Read it from a tensor that every replay refreshes: declare it as an input field, or write it "
    "in place before each replay."
)
_UNDECLARED = (
    "If it may change, read it from a tensor, or capture again after each change. Declared in "
    "host_values with the values that it takes, it is an error."
)
_NUMBER = re.compile(r"-?(?:inf|\d+(?:\.\d+)?(?:e[+-]?\d+)?)")
_STRUCTURE = (
    "A graph does not branch on host values: compute each case on the device and select with "
    "torch.where, or capture again when the value changes."
)


@dataclass(frozen=True, slots=True)
class HostChange:
    """One change that the host may make between two replays.

    Attributes:
        name: What changes, for summaries.
        subject: The same as the object of a sentence.
        before, after: Text of the two values.
        paths: Numbers, lists and sets of the forward that it changes.
    """

    name: str
    subject: str
    before: str
    after: str
    change: Change
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


def sample_batches(
    target: CaptureTarget, runner: Runner[Any, Any], seed: int, live: int | None = None
) -> DrawBatch:
    """Return a function that draws the batch of a size, of at most ``live`` requests."""
    return lambda size: target.batch(runner.mode, min(live or size, size), seed)


def host_changes(target: CaptureTarget, runner: Runner[Any, Any]) -> Iterator[HostChange]:
    """Yield another batch, fewer live requests, and each declared value after the first."""
    yield HostChange(
        name="batch contents",
        subject="the batch contents",
        before="one batch",
        after="another",
        change=Change(draw=sample_batches(target, runner, seed=2)),
    )
    if runner.table.largest > 1:
        yield HostChange(
            name="live requests",
            subject="the number of live requests",
            before="a full batch",
            after="1 request",
            change=Change(draw=sample_batches(target, runner, seed=1, live=1)),
        )
    for name, (setter, values) in target.host_values.items():
        for value in values[1:]:
            yield HostChange(
                name,
                f"`{name}`",
                _one_line(values[0]),
                _one_line(value),
                Change(partial(_declared, setter, values[0], value)),
                changed_names(target.forwards[runner.mode], setter, values[0], value),
            )


@contextmanager
def _declared(setter: Callable[[Any], object], before: Any, after: Any) -> Iterator[None]:
    try:
        setter(after)
        yield
    finally:
        setter(before)


def _one_line(value: Any) -> str:
    return " ".join(repr_without_address(value).split())


def report_change(
    check: Check,
    change: HostChange,
    differences: Sequence[CaptureDifference],
    size: int,
    nodes: Sequence[Node],
) -> None:
    """Report one finding per captured value, which many nodes may share, such as all layers."""
    groups: dict[Any, list[CaptureDifference]] = {}
    for difference in comparable(differences):
        shared = node_name(difference, nodes), replace(difference, node=0)  # all but the node
        groups.setdefault(shared, []).append(difference)
    for first, *others in groups.values():
        more = f" The same holds for {count_of(len(others), 'more node')}." if others else ""
        check.report(
            FindingKind.FROZEN_VALUE,
            f"{_sentence(first, change, nodes)}{more}",
            batch_size=size,
            **first.facts(nodes),
            names=change.paths,
            advice=_STRUCTURE if first.what in ("kernel", "number of nodes") else _VALUE,
        )


def report_followed(
    check: Check,
    candidate: Candidate,
    by_size: DifferencesBySize,
    records: Mapping[int, Sequence[Node]],
) -> None:
    """Report an undeclared number that graphs follow, once per size."""
    number = candidate.first
    for size, differences in by_size.items():
        if not differences:
            continue
        first, *others = comparable(differences)
        nodes, num_others = records[size], len({difference.node for difference in others})
        more = f", and in {count_of(num_others, 'more node')}" if others else ""
        check.report(
            FindingKind.FROZEN_VALUE,
            f"`{number.name}` = {value_text(number.before)} is frozen in "
            f"{_frozen_in(number, first, nodes)}{more}.",
            severity="note",
            batch_size=size,
            **first.facts(nodes),
            names=tuple(number.name for number in candidate.values),
            cause=number.name,
            advice=_UNDECLARED,
        )


def report_constants(
    check: Check, constants: Sequence[HostNumber], records: Mapping[int, Sequence[Node]]
) -> int:
    """Report constants of the architecture that are among the arguments of nodes, as one note.

    Returns:
        Their number.
    """
    arguments = {
        float(text)
        for nodes in records.values()
        for node in nodes
        for argument in node.arguments
        if argument.kind in ("value", "number", "struct") and "#" not in argument.text
        for text in _NUMBER.findall(argument.text)
    }
    kept = [number for number in constants if _is_among(number.before, arguments)]
    if kept:
        check.report(
            FindingKind.ARCHITECTURE_CONSTANTS,
            "constants of the architecture are among the arguments of nodes; the audit did not "
            "change them.",
            names=tuple(f"{number.name} = {number.before!r}" for number in kept),
            cause="constants",
        )
    return len(kept)


def _is_among(value: Any, arguments: set[float]) -> bool:
    if type(value) not in (int, float) or value in (0, 1):
        return False
    return value in arguments or any(
        math.isclose(value, argument, rel_tol=1e-6) for argument in arguments
    )


def _frozen_in(number: HostNumber, difference: CaptureDifference, nodes: Sequence[Node]) -> str:
    place = location(difference, nodes)
    if difference.what in ("kernel", "number of nodes"):
        return f"{place} ({difference.before}): the graph captured one case"
    if difference.before == value_text(number.before):
        return place
    return f"{place}, which is {difference.before}"


def _sentence(difference: CaptureDifference, change: HostChange, nodes: Sequence[Node]) -> str:
    before, after = difference.before, difference.after
    captured = "a value derived from it"
    if difference.what in ("kernel", "number of nodes"):
        captured = "one case"
    elif difference.is_memory:
        captured = "the tensor that it replaces"
    elif (before, after) == (change.before, change.after):
        captured = "its value"
    values = f"{before}, then {after}"
    if captured != "its value":
        values = f"{before} for {change.before}, then {after} for {change.after}"
    place = location(difference, nodes)
    return f"{place} follows {change.subject} ({values}): the graph captured {captured}."
