"""An AuditReport as text: its checks, its findings, and the verdict."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from graphkit.records import AuditCheck, AuditReport, Finding, count_of
from graphkit.views.environment import environment_line

_STYLES = {"error": "bold red", "warning": "yellow"}


def audit_view(report: AuditReport) -> RenderableType:
    """Return the checks of each audit, every finding with its advice, and the verdict."""
    return Group(*_parts(report))


def _parts(report: AuditReport) -> Iterator[RenderableType]:
    yield Text(environment_line(report.target, report.backend, report.environment))
    for audit, checks in groupby(report.checks, key=lambda check: check.audit):
        yield _checks_table(audit, list(checks))
    for finding in report.findings:
        yield from _finding(finding)
    yield _verdict(report)


def _checks_table(audit: str, checks: list[AuditCheck]) -> Table:
    table = Table(title=audit, title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.add_column("mode")
    table.add_column("size", justify="right")
    table.add_column("seconds", justify="right")
    table.add_column("check")
    for check in checks:
        style = "red" if check.findings else ""
        size = str(check.batch_size) if check.batch_size else ""
        table.add_row(check.mode, size, f"{check.seconds:.2f}", check.text, style=style)
    return table


def _finding(finding: Finding) -> Iterator[RenderableType]:
    size = f" {finding.batch_size}" if finding.batch_size else ""
    where = f"{finding.mode}{size}: " if finding.mode else ""
    title = f"{finding.severity}: {finding.kind}: "
    yield Text.assemble((title, _STYLES.get(finding.severity, "")), where, finding.text)
    origin = ", ".join(filter(None, (finding.module, finding.source)))
    if origin:
        yield Padding(Text(f"made by {origin}"), (0, 0, 0, 2))
    if finding.advice:
        yield Padding(Text(finding.advice, style="dim"), (0, 0, 0, 2))


def _verdict(report: AuditReport) -> Text:
    checks = count_of(len(report.checks), "check")
    if not report.findings:
        return Text(f"{checks}, no finding.", style="green")
    return Text(f"{checks}, {count_of(len(report.findings), 'finding')}.", style="bold red")
