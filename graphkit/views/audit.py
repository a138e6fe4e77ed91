"""An AuditReport as people see it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from graphkit.records import AuditCheck, AuditReport, Finding

_STYLES = {"error": "bold red", "warning": "yellow"}


def audit_view(report: AuditReport) -> RenderableType:
    """What was looked at, then every finding with what to do about it, then the verdict."""
    return Group(*_parts(report))


def _parts(report: AuditReport) -> Iterator[RenderableType]:
    facts = report.environment
    yield Text(
        f"{report.target} on {facts.device}, {report.backend} backend, torch {facts.torch}"
        + (f", CUDA {facts.cuda}, driver {facts.driver}" if facts.driver else "")
    )
    for audit, checks in groupby(report.checks, key=lambda check: check.audit):
        yield _checks_table(audit, list(checks))
    for finding in report.findings:
        yield from _told(finding)
    yield _verdict(report)


def _checks_table(audit: str, checks: list[AuditCheck]) -> Table:
    table = Table(title=audit, title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.add_column("mode")
    table.add_column("size", justify="right")
    table.add_column("seconds", justify="right")
    table.add_column("what was looked at")
    for check in checks:
        style = "red" if check.findings else ""
        size = str(check.batch_size) if check.batch_size else ""
        table.add_row(check.mode, size, f"{check.seconds:.2f}", check.text, style=style)
    return table


def _told(finding: Finding) -> Iterator[RenderableType]:
    size = f" {finding.batch_size}" if finding.batch_size else ""
    where = f"{finding.mode}{size}: " if finding.mode else ""
    title = f"{finding.severity}: {finding.kind}: "
    yield Text.assemble((title, _STYLES.get(finding.severity, "")), where, finding.text)
    made_by = ", ".join(filter(None, (finding.module, finding.source)))
    if made_by:
        yield Padding(Text(f"made by {made_by}"), (0, 0, 0, 2))
    if finding.advice:
        yield Padding(Text(finding.advice, style="dim"), (0, 0, 0, 2))


def _verdict(report: AuditReport) -> Text:
    looks, findings = len(report.checks), len(report.findings)
    if not findings:
        return Text(f"{looks} checks, no finding.", style="green")
    plural = "s" if findings > 1 else ""
    return Text(f"{looks} checks, {findings} finding{plural}.", style="bold red")
