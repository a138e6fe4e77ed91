"""Audits on several ranks at once.

Captures and replays of a forward with collectives need all ranks. An audit therefore captures and
replays on all ranks equally often: where it goes on depending on what it found, the ranks agree.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from graphkit.records import AuditReport, Finding
from graphkit.records.audit import Audit, worst_first
from graphkit.runners import Runner

NOT_ON_RANKS = {
    Audit.POOL_POISON: "ranks have pools of their own, and would overwrite and replay them a "
    "different number of times",
    Audit.SHADOW: "the search for the first node that differs would replay other parts of a graph "
    "on each rank",
    Audit.LAUNCH: "launches are timed until they are steady, and ranks would launch a different "
    "number of times",
    Audit.LOOP: "ranks would search for the first step that differs through different launches",
}
"""Audits that cannot run on several ranks, with the reason."""


def on_any_rank(runner: Runner[Any, Any], is_needed: bool) -> bool:
    """Return whether any rank of the runner's group needs a step of an audit, which all then run.

    Raises:
        CaptureFailure: A rank has left.
    """
    return is_needed if runner.group is None else runner.group.on_any(is_needed)


def merged_reports(reports: Iterable[AuditReport]) -> AuditReport:
    """Return the report of rank 0, with the findings that only other ranks have."""
    first, *others = reports
    findings = list(first.findings)
    for rank, report in enumerate(others, 1):
        findings += [
            replace(finding, text=f"rank {rank}: {finding.text}")
            for finding in report.findings
            if not any(_is_same(finding, known) for known in findings)
        ]
    return replace(first, findings=worst_first(findings))


def _is_same(finding: Finding, known: Finding) -> bool:
    facts = [(f.audit, f.kind, f.severity, f.modes, f.kernel, f.source) for f in (finding, known)]
    return facts[0] == facts[1]
