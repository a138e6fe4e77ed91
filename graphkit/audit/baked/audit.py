"""Search for host values that a graph captured.

A runner's graphs are captured twice without a change, which certifies that captures are
deterministic. Then the audit applies one change of the host at a time: what differs in the graph
depends on it, and replays ignore the change. Two captures that differ in one scalar differ in
exactly that argument, so the finding names the node and the line that captured it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from graphkit.audit.audit_log import AuditLog, Check
from graphkit.audit.baked.confirmed_differences import DifferencesBySize, confirmed_differences
from graphkit.audit.baked.host_changes import HostChange, host_changes, set_first_values
from graphkit.audit.baked.recaptures import Baseline, Recaptures
from graphkit.audit.finding_text import argument_text
from graphkit.graphs.walk.capture_differences import CaptureDifference
from graphkit.records import Node, count_of
from graphkit.runners import Runner
from graphkit.targets import CaptureTarget

_NOT_DETERMINISTIC = "Keep random numbers, clocks and counters out of the host side of the forward."
_VALUE = (
    "Read it from a tensor that every replay refreshes: declare it as an input field, or write it "
    "in place before each replay."
)
_STRUCTURE = (
    "A graph does not branch on host values: compute each case on the device and select with "
    "torch.where, or capture again when the value changes."
)


def audit_baked(target: CaptureTarget, runner: Runner[Any, Any], log: AuditLog) -> None:
    """Report host values that a runner's graphs captured.

    Args:
        target: Declares what may change: its sample batches, and ``host_values``.
        runner: A runner of the target, planned or captured. Nothing may be replayed meanwhile.
        log: Collects the findings.

    Raises:
        CaptureError: The forward cannot be captured.
        TargetError: A host value has fewer than two values.
    """
    set_first_values(target)
    recaptures = Recaptures(target, runner)
    with recaptures.first_kept():
        with log.check("baked", runner.mode.name) as check:
            baseline = _check_determinism(recaptures, check)
        for change in host_changes(target, runner, recaptures):
            with log.check("baked", runner.mode.name) as check:
                found = confirmed_differences(recaptures, baseline, change)
                for size, differences in found.items():
                    _report(check, change, differences, size, baseline.records[size])
                check.text = f"changed {change.name}: {_counts(found, baseline)}"


def _check_determinism(recaptures: Recaptures, check: Check) -> Baseline:
    """Capture twice without a change, and report differences."""
    baseline, second = recaptures.baseline()
    found = baseline.differences(baseline.nodes, second)
    check.text = f"captured again: {_counts(found, baseline)}"
    if any(baseline.unset.values()):
        check.text += "; ignored bytes that torch leaves unset"
    for size, (first, *others) in ((size, each) for size, each in found.items() if each):
        check.report(
            "capture is not deterministic",
            f"two captures of the same step differ in {count_of(1 + len(others), 'place')}, first "
            f"in {_location(first, baseline.records[size])} ({first.before}, then {first.after}).",
            batch_size=size,
            advice=_NOT_DETERMINISTIC,
            before=first.before,
            after=first.after,
        )
    return baseline


def _report(
    check: Check,
    change: HostChange,
    differences: Sequence[CaptureDifference],
    size: int,
    nodes: Sequence[Node],
) -> None:
    """Report one finding per captured value, which many nodes may share, such as all layers."""
    groups: dict[Any, list[CaptureDifference]] = {}
    for each in _comparable(differences):
        facts = each.what, each.argument, each.offset, each.before, each.after
        groups.setdefault((_name(each, nodes), *facts), []).append(each)
    for first, *others in groups.values():
        more = f" The same holds for {count_of(len(others), 'more node')}." if others else ""
        check.report(
            "baked value",
            f"{_sentence(first, change, nodes)}{more}",
            node=nodes[first.node] if first.node < len(nodes) else None,
            batch_size=size,
            argument=first.argument,
            offset=first.offset,
            before=first.before,
            after=first.after,
            advice=_STRUCTURE if first.what in ("kernel", "number of nodes") else _VALUE,
        )


def _comparable(differences: Sequence[CaptureDifference]) -> Iterator[CaptureDifference]:
    """Yield differences up to the first different kernel if the numbers of nodes differ.

    After a node that only one capture has, the comparison pairs unrelated nodes.
    """
    is_longer = any(each.what == "number of nodes" for each in differences)
    for each in differences:
        yield each
        if is_longer and each.what == "kernel":
            return


def _sentence(difference: CaptureDifference, change: HostChange, nodes: Sequence[Node]) -> str:
    before, after = difference.before, difference.after
    captured = "a value derived from it"
    if difference.what in ("kernel", "number of nodes"):
        captured = "one case"
    elif (before, after) == (change.before, change.after):
        captured = "its value"
    values = f"{before}, then {after}"
    if captured != "its value":
        values = f"{before} for {change.before}, then {after} for {change.after}"
    location = _location(difference, nodes)
    return f"{location} follows {change.subject} ({values}): the graph captured {captured}."


def _location(difference: CaptureDifference, nodes: Sequence[Node]) -> str:
    if difference.what == "number of nodes":
        return "the number of nodes"
    if difference.what == "kernel":
        return f"the kernel of node {difference.node}"
    if difference.argument is not None:
        node = nodes[difference.node]
        return argument_text(node, difference.argument, difference.offset or 0)
    return f"{difference.what} of `{_name(difference, nodes)}` (node {difference.node})"


def _name(difference: CaptureDifference, nodes: Sequence[Node]) -> str:
    return nodes[difference.node].short_name if difference.node < len(nodes) else ""


def _counts(found: DifferencesBySize, baseline: Baseline) -> str:
    differences, nodes = (sum(map(len, each.values())) for each in (found, baseline.nodes))
    return (
        f"{count_of(differences, 'difference')} in {count_of(nodes, 'node')} of "
        f"{count_of(len(found), 'graph')}"
    )
