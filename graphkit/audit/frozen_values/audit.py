"""Search for host values that a graph captured.

A runner's graphs are captured twice without a change, which certifies that captures are
deterministic. Then the audit applies one change of the host at a time: what differs in the graph
depends on it, and replays ignore the change. Two captures that differ in one scalar differ in
exactly that argument, so the finding names the node and the line that captured it.
"""

from __future__ import annotations

from typing import Any

from graphkit.audit.audit_log import AuditLog, Check
from graphkit.audit.capture_differences import location
from graphkit.audit.finding_kinds import FindingKind
from graphkit.audit.frozen_values.host_changes import (
    host_changes,
    report_change,
    report_constants,
    report_followed,
    sample_batches,
    set_first_values,
)
from graphkit.audit.frozen_values.undeclared import UndeclaredNumbers
from graphkit.audit.recaptures import Baseline, DifferencesBySize, Recaptures
from graphkit.records import count_of
from graphkit.records.audit import Audit
from graphkit.runners import Runner
from graphkit.runners.targets import CaptureTarget


def audit_frozen_values(target: CaptureTarget, runner: Runner[Any, Any], log: AuditLog) -> None:
    """Report host values that a runner's graphs captured.

    Raises:
        CaptureError: The forward cannot be captured.
        TargetError: A host value has fewer than two values.
    """
    set_first_values(target)
    draw = sample_batches(target, runner, seed=1)
    recaptures = Recaptures(runner, draw, weights=target.weights)
    with recaptures.first_kept():
        with log.check(Audit.FROZEN, runner.mode.name) as check:
            baseline = _check_determinism(recaptures, check)
            is_deterministic = not check.findings
        for change in host_changes(target, runner):
            with log.check(Audit.FROZEN, runner.mode.name) as check:
                by_size = recaptures.differences(baseline, change.change)
                by_size = recaptures.confirmed(baseline, change.change, by_size)
                for size, differences in by_size.items():
                    report_change(check, change, differences, size, baseline.records[size])
                check.text = f"changed {change.name}: {_counts(by_size, baseline)}"
        with log.check(Audit.FROZEN, runner.mode.name) as check:
            if target.group is not None:
                check.text = "undeclared numbers: not searched on several ranks"
            elif not is_deterministic:
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
        report_followed(check, candidate, by_size, baseline.records)
    constants = numbers.constants
    kept = report_constants(check, constants, baseline.records)
    check.text = (
        f"changed {count_of(len(numbers.candidates), 'undeclared number')} in "
        f"{count_of(numbers.captures, 'capture')}: graphs follow {len(numbers.followed)}; "
        f"{kept} of {count_of(len(constants), 'constant')} of the architecture among arguments"
    )
    if numbers.left:
        names = ", ".join(candidate.first.name for candidate in numbers.left)
        check.text += f"; not searched within {count_of(numbers.captures, 'capture')}: {names}"


def _check_determinism(recaptures: Recaptures, check: Check) -> Baseline:
    """Capture twice without a change, and report differences."""
    baseline = recaptures.baseline(is_repeated=True)
    by_size = baseline.repeated
    check.text = f"captured again: {_counts(by_size, baseline)}"
    if any(baseline.unset.values()):
        check.text += "; ignored bytes that torch leaves unset"
    for size, differences in by_size.items():
        if not differences:
            continue
        first = differences[0]
        check.report(
            FindingKind.NONDETERMINISTIC_CAPTURE,
            f"two captures of the same step differ in {count_of(len(differences), 'place')}, first "
            f"in {location(first, baseline.records[size])} ({first.before}, then {first.after}).",
            batch_size=size,
            cause=FindingKind.NONDETERMINISTIC_CAPTURE.value,
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
