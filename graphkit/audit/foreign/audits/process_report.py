"""What the audits of this process checked and found so far, and its report."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from graphkit.audit.audit_log import AuditLog, Check
from graphkit.audit.causes import merged_by_cause
from graphkit.audit.foreign.audits.checked_memory import NotChecked
from graphkit.audit.foreign.process_files import AuditFileWriter
from graphkit.graphs.capture_failure import describe_exception
from graphkit.records import AuditCheck, AuditReport, Finding
from graphkit.records.audit import NOT_CHECKED, Audit, worst_severity


class ProcessReport:
    """Collects checks and findings, and writes the report of this process.

    Args:
        writer: Receives the report after each check; ``None`` keeps it in memory.
        device: Returns the device that the report is about; see ``CudaDevice``.
    """

    def __init__(self, writer: AuditFileWriter | None, device: Callable[[], Any]) -> None:
        self._writer, self._device = writer, device
        self._checks: dict[tuple[str, str], AuditCheck] = {}
        self._findings: list[Finding] = []
        self._reported: set[tuple[object, ...]] = set()

    @contextmanager
    def check(self, audit: Audit, graph: str = "") -> Iterator[Check]:
        """Run a check, which is added when the block ends. An error in it becomes its summary."""
        log, interruption = AuditLog(), None
        with log.check(audit, graph) as check:
            try:
                yield check
            except BaseException as error:
                check.text = NOT_CHECKED + failure_text(error)
                interruption = None if isinstance(error, Exception) else error
        self._add(log)
        if interruption is not None:
            raise interruption

    def add_finding(self, finding: Finding) -> None:
        """Add a finding of a check that is no replay's, such as a comparison of digests."""
        self._findings.append(finding)
        self._write(is_urgent=True)

    def report(self) -> AuditReport:
        """Return what was checked and found so far, one finding per cause."""
        device = self._device()
        return AuditReport(
            target=" ".join(sys.orig_argv),
            backend=device.backend,
            environment=device.environment(),
            checks=tuple(self._checks.values()),
            findings=merged_by_cause(self._findings),
        )

    def end(self) -> None:
        """Write the report if anything was checked."""
        if self._checks:
            self._write(is_urgent=True)

    def _add(self, log: AuditLog) -> None:
        """Add a finished check: repeated ones become one, and findings are reported once."""
        new = []
        for finding in log.findings:
            place = (finding.node, finding.argument, finding.cause)
            key = (finding.audit, finding.mode, finding.kind, *place)
            if key not in self._reported:
                self._reported.add(key)
                new.append(finding)
        self._findings += new
        for check in log.checks:
            graph = check.audit, check.mode
            before = self._checks.get(graph)
            self._checks[graph] = check if before is None else _added(before, check, len(new))
        self._write(is_urgent=bool(new))

    def _write(self, *, is_urgent: bool) -> None:
        if self._writer is None or not (is_urgent or self._writer.is_due()):
            return
        # Parts of several processes are merged by cause once more, from single findings.
        self._writer.write(replace(self.report(), findings=tuple(self._findings)))


def failure_text(error: BaseException) -> str:
    """Return why a check failed, in a line."""
    return str(error) if isinstance(error, NotChecked) else describe_exception(error)


def _added(before: AuditCheck, check: AuditCheck, new_findings: int) -> AuditCheck:
    """Return two checks of a graph as one: the later text, and findings and times of both."""
    return replace(
        check,
        findings=before.findings + new_findings,
        severity=worst_severity([before, check]),
        seconds=before.seconds + check.seconds,
        text=check.text or before.text,
    )
