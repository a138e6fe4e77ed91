"""Which host values a graph froze.

A graph is captured twice with everything equal: no difference certifies that capturing it is
deterministic. Then one thing that the host may change is changed at a time, and what differs in
the graph was baked into it. (Idea and feasibility: nobody else does this; two captures that differ
in one scalar differ in exactly that argument.)
"""

from __future__ import annotations

from typing import Any

from graphkit.audit.audit_log import AuditLog, Check
from graphkit.audit.baked.confirmed_differences import what_changes
from graphkit.audit.baked.host_changes import begin, changes_of
from graphkit.audit.baked.recaptures import Baseline, Recaptures
from graphkit.audit.baked.words import counted, tell
from graphkit.runners import Runner
from graphkit.targets import CaptureTarget


def audit_baked(target: CaptureTarget, runner: Runner[Any], log: AuditLog) -> None:
    """Check for host values that a runner's graphs froze.

    Args:
        target: Says what may change: its sample batches, and ``dynamic``.
        runner: One of the target's, planned or captured; nothing may be replayed meanwhile.
        log: Takes what is found.

    Raises:
        CaptureError: The forward cannot be captured.
        TargetError: Something in ``dynamic`` has fewer than two values.
    """
    begin(target)
    recaptures = Recaptures(target, runner)
    with recaptures.kept():
        with log.check("baked", runner.mode.name) as check:
            baseline = _certified(recaptures, check)
        for change in changes_of(target, runner, recaptures):
            with log.check("baked", runner.mode.name) as check:
                found = what_changes(recaptures, baseline, change)
                for size, each in found.items():
                    tell(check, change, each, size, baseline.nodes[size])
                check.text = f"changed {change.name}: {counted(found, baseline)}"


def _certified(recaptures: Recaptures, check: Check) -> Baseline:
    """Capture twice with everything equal, and say where the two differ."""
    baseline, again = recaptures.baseline()
    found = baseline.differences(baseline.images, again)
    check.text = f"captured again: {counted(found, baseline)}"
    if any(baseline.unset.values()):
        check.text += "; bytes that torch leaves unset are passed over"
    for size, each in found.items():
        if each:
            check.report(
                "capture is not deterministic",
                f"two captures with everything equal differ in {len(each)} places, first in "
                f"node {each[0].node}: {each[0].what} {each[0].before} and {each[0].after}.",
                batch_size=size,
                advice="Check for random numbers, time, or counters that the forward reads on "
                "the host.",
                before=each[0].before,
                after=each[0].after,
            )
    return baseline
