"""An AuditReport as text: its checks, its findings, and the verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import groupby

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from graphkit.records import AuditCheck, AuditReport, Finding, count_of, listed
from graphkit.records.audit import SEVERITIES
from graphkit.views.formatting import environment_facts, facts_table

_STYLES = {"error": "red", "warning": "yellow", "note": "cyan"}
_MAX_NAMES = 6


def audit_view(report: AuditReport) -> RenderableType:
    """Return the checks of each audit, and what ``findings_view`` returns."""
    checks = groupby(report.checks, key=lambda check: check.audit)
    return Group(
        facts_table([("target", report.target), *environment_facts(report)]),
        *(_checks_table(audit, list(of_audit)) for audit, of_audit in checks),
        findings_view(report),
    )


def findings_view(report: AuditReport) -> RenderableType:
    """Return every finding with its advice, and the verdict."""
    findings = (part for finding in report.findings for part in _finding(finding))
    return Group(*findings, _verdict(report))


def _checks_table(audit: str, checks: list[AuditCheck]) -> Table:
    table = Table(title=audit, title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.add_column("mode")
    table.add_column("size", justify="right")
    table.add_column("seconds", justify="right")
    table.add_column("check")
    for check in checks:
        style = _STYLES.get(check.severity, "")
        size = str(check.batch_size) if check.batch_size else ""
        table.add_row(check.mode, size, f"{check.seconds:.2f}", check.text, style=style)
    return table


def _finding(finding: Finding) -> Iterator[RenderableType]:
    title = f"{finding.severity}: {finding.kind}: "
    style = f"bold {_STYLES.get(finding.severity, '')}".strip()
    yield Text.assemble((title, style), _graphs(finding), finding.text)
    if finding.names:
        yield Padding(Text(listed(finding.names, _MAX_NAMES)), (0, 0, 0, 2))
    origin = ", ".join(filter(None, (finding.module, finding.source)))
    if origin:
        yield Padding(Text(f"made by {origin}"), (0, 0, 0, 2))
    if finding.advice:
        yield Padding(Text(finding.advice, style="dim"), (0, 0, 0, 2))


def _graphs(finding: Finding) -> str:
    """Return the modes and sizes of a finding, such as ``TARGET_VERIFY 2, 8: ``."""
    sizes = finding.batch_sizes or ((finding.batch_size,) if finding.batch_size else ())
    modes = ", ".join(finding.modes or filter(None, (finding.mode,)))
    graphs = f"{modes} {', '.join(map(str, sizes))}".strip()
    return f"{graphs}: " if graphs else ""


def _verdict(report: AuditReport) -> Text:
    checks = count_of(len(report.checks), "check")
    if not report.findings:
        return Text(f"{checks}, no finding.", style="green")
    counts = Counter(finding.severity for finding in report.findings)
    by_severity = {severity: counts[severity] for severity in SEVERITIES if counts[severity]}
    style = f"bold {_STYLES[next(iter(by_severity))]}"
    texts = (count_of(number, severity) for severity, number in by_severity.items())
    return Text(f"{checks}: {', '.join(texts)}.", style=style)
