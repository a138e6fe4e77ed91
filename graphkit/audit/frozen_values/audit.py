"""Search for host values that a graph captured.

A runner's graphs are captured twice without a change, which certifies that captures are
deterministic. Then the audit applies one change of the host at a time: what differs in the graph
depends on it, and replays ignore the change. Two captures that differ in one scalar differ in
exactly that argument, so the finding names the node and the line that captured it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from graphkit.audit.audit_log import AuditLog, Check
from graphkit.audit.capture_differences import CaptureDifference, comparable, location, node_name
from graphkit.audit.causes import REPLACED_MEMORY
from graphkit.audit.finding_kinds import FindingKind
from graphkit.audit.frozen_values.undeclared import (
    Candidate,
    UndeclaredNumbers,
    changed_names,
    declared,
)
from graphkit.audit.host_objects.host_numbers import HostNumber, value_text
from graphkit.audit.recaptures import Baseline, Change, DifferencesBySize, DrawBatch, Recaptures
from graphkit.errors import TargetError
from graphkit.graphs.walk.recorder_walk import repr_without_address
from graphkit.records import Node, count_of
from graphkit.records.audit import Audit
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


def audit_frozen_values(target: CaptureTarget, runner: Runner[Any, Any], log: AuditLog) -> None:
    """Report host values that a runner's graphs captured.

    Raises:
        CaptureError: The forward cannot be captured.
        TargetError: A host value has fewer than two values.
    """
    _set_first_values(target)
    draw = _sample_batches(target, runner, seed=1)
    recaptures = Recaptures(runner, draw, weights=target.weights)
    with recaptures.first_kept():
        with log.check(Audit.FROZEN, runner.mode.name) as check:
            baseline = _check_determinism(recaptures, check)
            # Memory that each call replaces hides no number.
            is_searched = all(d.is_memory for found in baseline.repeated.values() for d in found)
        for change in _host_changes(target, runner):
            with log.check(Audit.FROZEN, runner.mode.name) as check:
                by_size = recaptures.differences(baseline, change.change)
                by_size = recaptures.confirmed(baseline, change.change, by_size)
                for size, differences in by_size.items():
                    _report_change(check, change, differences, size, baseline.records[size])
                check.text = f"changed {change.name}: {_counts(by_size, baseline)}"
        with log.check(Audit.FROZEN, runner.mode.name) as check:
            if target.group is not None:
                check.text = "undeclared numbers: not searched on several ranks"
            elif not is_searched:
                check.text = "undeclared numbers: not searched, captures are not deterministic"
            else:
                _search_undeclared(target, runner, recaptures, baseline, check)


def _search_undeclared(
    target: CaptureTarget,
    runner: Runner[Any, Any],
    recaptures: Recaptures,
    baseline: Baseline,
    check: Check,
) -> None:
    """Report undeclared numbers that graphs follow, and constants of the architecture."""
    numbers = UndeclaredNumbers(target, runner)
    numbers.search(recaptures, baseline)
    for candidate, by_size in numbers.followed:
        _report_followed(check, candidate, by_size, baseline.records)
    constants = numbers.constants
    kept = _report_constants(check, constants, baseline.records)
    check.text = (
        f"changed {count_of(len(numbers.candidates), 'undeclared number')} in "
        f"{count_of(numbers.captures, 'capture')}: graphs follow {len(numbers.followed)}; "
        f"{kept} of {count_of(len(constants), 'constant')} of the architecture among arguments"
    )
    if numbers.left:
        names = ", ".join(candidate.first.name for candidate in numbers.left)
        check.text += f"; not searched within {count_of(numbers.captures, 'capture')}: {names}"


def _check_determinism(recaptures: Recaptures, check: Check) -> Baseline:
    """Capture twice without a change, and report differences: of addresses only if all are."""
    baseline = recaptures.baseline(is_repeated=True)
    by_size = baseline.repeated
    check.text = f"captured again: {_counts(by_size, baseline)}"
    if any(baseline.unset.values()):
        check.text += "; ignored bytes that torch leaves unset"
    for size, differences in by_size.items():
        if not differences:
            continue
        nodes = baseline.records[size]
        others = [difference for difference in differences if not difference.is_address(nodes)]
        places = others or differences
        first = places[0]
        check.report(
            FindingKind.NONDETERMINISTIC_CAPTURE,
            f"two captures of the same step differ in {count_of(len(places), 'place')}, first in "
            f"{location(first, nodes)} ({first.before}, then {first.after}).",
            batch_size=size,
            cause=FindingKind.NONDETERMINISTIC_CAPTURE.value if others else REPLACED_MEMORY,
            before=first.before,
            after=first.after,
        )
    return baseline


def _counts(by_change: DifferencesBySize, baseline: Baseline) -> str:
    differences, nodes = (
        sum(map(len, by_size.values())) for by_size in (by_change, baseline.nodes)
    )
    return (
        f"{count_of(differences, 'difference')} in {count_of(nodes, 'node')} of "
        f"{count_of(len(by_change), 'graph')}"
    )


@dataclass(frozen=True, slots=True)
class _HostChange:
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


def _set_first_values(target: CaptureTarget) -> None:
    for name, (setter, values) in target.host_values.items():
        if len(values) < 2:
            raise TargetError(
                f"target {target.name!r}: host value {name!r} has "
                f"{count_of(len(values), 'value')}, so there is nothing to compare. Give it two "
                "or more."
            )
        setter(values[0])


def _sample_batches(
    target: CaptureTarget, runner: Runner[Any, Any], seed: int, live: int | None = None
) -> DrawBatch:
    """Return a function that draws the batch of a size, of at most ``live`` requests."""
    return lambda size: target.batch(runner.mode, min(live or size, size), seed)


def _host_changes(target: CaptureTarget, runner: Runner[Any, Any]) -> Iterator[_HostChange]:
    """Yield another batch, fewer live requests, and each declared value after the first."""
    other = Change(draw=_sample_batches(target, runner, seed=2))
    yield _HostChange("batch contents", "the batch contents", "one batch", "another", other)
    if runner.table.largest > 1:
        fewer = Change(draw=_sample_batches(target, runner, seed=1, live=1))
        yield _HostChange(
            "live requests", "the number of live requests", "a full batch", "1 request", fewer
        )
    for name, (setter, values) in target.host_values.items():
        for value in values[1:]:
            yield _HostChange(
                name,
                f"`{name}`",
                _one_line(values[0]),
                _one_line(value),
                Change(partial(declared, setter, values[0], value)),
                changed_names(target.forwards[runner.mode], setter, values[0], value),
            )


def _one_line(value: Any) -> str:
    return " ".join(repr_without_address(value).split())


def _report_change(
    check: Check,
    change: _HostChange,
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


def _report_followed(
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


def _report_constants(
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


def _sentence(difference: CaptureDifference, change: _HostChange, nodes: Sequence[Node]) -> str:
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
