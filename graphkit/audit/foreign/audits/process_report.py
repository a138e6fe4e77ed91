"""What the audits of this process checked and found so far, and its report."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from graphkit.audit.audit_log import AuditLog, Check, NotChecked
from graphkit.audit.foreign.process_files import AuditFileWriter
from graphkit.graphs.capture_failure import describe_exception
from graphkit.records import AuditCheck, AuditReport, Finding
from graphkit.records.audit import NOT_CHECKED, Audit, worst_severity


class ProcessReport(AuditLog):
    """Collects checks and findings, and writes the report of this process.

    Repeated checks of a graph become one, and each finding is reported once.

    Args:
        writer: Receives the report after each check; ``None`` keeps it in memory.
        device: Returns the device that the report is about; see ``CudaDevice``.
    """

    def __init__(self, writer: AuditFileWriter | None, device: Callable[[], Any]) -> None:
        super().__init__()
        self._writer, self._device = writer, device
        self._by_graph: dict[tuple[str, str], AuditCheck] = {}
        self._reported: set[tuple[object, ...]] = set()

    @contextmanager
    def check(self, audit: Audit, mode: str = "", batch_size: int = 0) -> Iterator[Check]:
        """Run a check, which is added when the block ends. An error in it becomes its summary."""
        interruption = None
        with super().check(audit, mode, batch_size) as check:
            try:
                yield check
            except BaseException as error:
                is_reason = isinstance(error, NotChecked)
                check.text = NOT_CHECKED + (str(error) if is_reason else describe_exception(error))
                interruption = None if isinstance(error, Exception) else error
        if interruption is not None:
            raise interruption

    def add_finding(self, finding: Finding) -> None:
        """Add a finding of a check that is no replay's, such as a comparison of digests."""
        self.findings.append(finding)
        self._write(is_urgent=True)

    def current(self) -> AuditReport:
        """Return the report of this process so far."""
        device = self._device()
        return self.report(" ".join(sys.orig_argv), device.backend, device.environment())

    def end(self) -> None:
        """Write the report if anything was checked."""
        if self.checks:
            self._write(is_urgent=True)

    def _add(self, check: AuditCheck, findings: Sequence[Finding]) -> None:
        new = []
        for finding in findings:
            place = (finding.node, finding.argument, finding.cause)
            key = (finding.audit, finding.mode, finding.kind, *place)
            if key not in self._reported:
                self._reported.add(key)
                new.append(finding)
        self.findings += new
        graph = check.audit, check.mode
        before = self._by_graph.get(graph)
        if before is not None:
            check = replace(
                check,
                findings=before.findings + len(new),
                severity=worst_severity([before, check]),
                seconds=before.seconds + check.seconds,
                text=check.text or before.text,
            )
        self._by_graph[graph] = check
        self.checks = [*self._by_graph.values()]
        self._write(is_urgent=bool(new))

    def _write(self, *, is_urgent: bool) -> None:
        if self._writer is None or not (is_urgent or self._writer.is_due()):
            return
        # Parts of several processes are merged by cause once more, from single findings.
        self._writer.write(replace(self.current(), findings=tuple(self.findings)))
