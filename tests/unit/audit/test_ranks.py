"""One report of the audits of several ranks."""

from __future__ import annotations

from graphkit.audit import merged_reports
from graphkit.records import AuditReport, Environment, Finding

ENVIRONMENT = Environment(device="d", torch="2", triton="3", cuda="", driver="", graphkit="0")


def report(*findings):
    made = tuple(
        Finding(audit="pads", kind=kind, severity=severity, text=text, modes=("DECODE",))
        for kind, severity, text in findings
    )
    return AuditReport(
        target="t", backend="recorder", environment=ENVIRONMENT, checks=(), findings=made
    )


def texts(*reports):
    return [(each.severity, each.text) for each in merged_reports(reports).findings]


def test_a_finding_of_all_ranks_is_reported_once():
    leak = ("leak", "error", "row 0 leaks")
    assert texts(report(leak), report(("leak", "error", "row 3 leaks"))) == [leak[1:]]


def test_findings_of_other_ranks_name_their_rank_and_come_by_severity():
    assert texts(
        report(("waste", "note", "pads")),
        report(("leak", "error", "row 0 leaks"), ("waste", "note", "pads")),
        report(("leak", "error", "row 1 leaks"), ("stale", "warning", "old rows")),
    ) == [
        ("error", "rank 1: row 0 leaks"), ("warning", "rank 2: old rows"), ("note", "pads"),
    ]  # fmt: skip


def test_the_modes_of_a_finding_stay():
    merged = merged_reports([report(("leak", "error", "row 0 leaks")), report()])
    assert merged == report(("leak", "error", "row 0 leaks"))
