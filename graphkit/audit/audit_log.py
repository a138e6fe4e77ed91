"""Collect the checks and findings of audits; texts of the places that findings name."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from graphkit.audit.causes import merged_by_cause
from graphkit.audit.finding_kinds import FindingKind
from graphkit.records import (
    AuditCheck,
    AuditReport,
    Environment,
    Finding,
    Mismatch,
    Node,
    distinct_text,
)
from graphkit.records.audit import NOT_CHECKED, Audit, worst_severity


class NotChecked(Exception):  # noqa: N818 - its text becomes the summary of a check
    """A check cannot be made, or replays cannot be compared. The text says why."""


class Check:
    """A check in progress. Its findings carry its audit, mode and batch size.

    Attributes:
        text: Summary of what was checked; set it before the check ends.
        findings: Findings reported so far.
        batch_size: The captured size; 0 for a check of all sizes.
    """

    def __init__(self, audit: Audit, mode: str, batch_size: int) -> None:
        self.text, self.batch_size = "", batch_size
        self.findings: list[Finding] = []
        self._facts: dict[str, Any] = {"audit": audit, "mode": mode, "batch_size": batch_size}

    def report(
        self, kind: FindingKind, text: str, *, node: Node | None = None, **facts: Any
    ) -> None:
        """Add a finding.

        Args:
            kind: Gives the finding its advice and severity, unless ``facts`` have others.
            text: One sentence on what was found.
            node: Graph node that the finding is about; fills in the finding's facts of it.
            facts: Other attributes of ``Finding``; they override those of the check.
        """
        if node is not None:
            place = {"node": node.index, "kernel": node.short_name}
            facts = {**place, "module": node.module, "source": node.source, **facts}
        usual = {"advice": kind.advice, "severity": kind.severity, **self._facts}
        self.findings.append(Finding(kind=kind.value, text=text, **(usual | facts)))

    def report_row(
        self,
        kind: FindingKind,
        wrong: Mismatch,
        live: int,
        sides: tuple[str, str],
        more: str = "",
        **facts: Any,
    ) -> None:
        """Add a finding about a row that differs between two runs, of ``live`` requests.

        ``sides`` say where the number that was got is from, and where the expected one is; ``more``
        has further sentences, with a space before them.
        """
        numbers = row_facts(wrong)
        text = (
            f"{row_text(wrong, live)} is {numbers['after']} {sides[0]} and {numbers['before']} "
            f"{sides[1]}{f' ({wrong.distance})' if wrong.distance else ''}.{more}"
        )
        self.report(kind, text, **(numbers | facts))


class AuditLog:
    """Checks and findings of a target's audits, in the order in which the audits ran.

    Attributes:
        tolerance: Multiple of the usual rounding that is allowed.
        checks: Finished checks.
        findings: Findings of these checks.
    """

    def __init__(self, tolerance: float = 1.0) -> None:
        self.tolerance = tolerance
        self.checks: list[AuditCheck] = []
        self.findings: list[Finding] = []

    def skip(self, audit: Audit, mode: str, reason: str) -> None:
        """Log that an audit was not run, with the reason as a phrase."""
        with self.check(audit, mode) as check:
            check.text = NOT_CHECKED + reason

    @contextmanager
    def check(self, audit: Audit, mode: str = "", batch_size: int = 0) -> Iterator[Check]:
        """Run one check; it is logged when the block ends, unless the block raises.

        Args:
            audit: The audit.
            mode: Forward mode; empty for a check of the whole target.
            batch_size: Captured size; 0 for a check of all sizes.
        """
        check = Check(audit, mode, batch_size)
        began = time.perf_counter()
        yield check
        done = AuditCheck(
            audit=audit,
            mode=mode,
            batch_size=batch_size,
            text=check.text,
            findings=len(check.findings),
            severity=worst_severity(check.findings),
            seconds=time.perf_counter() - began,
        )
        self._add(done, check.findings)

    def report(self, target: str, backend: str, environment: Environment) -> AuditReport:
        """Return what was logged so far as a report, with one finding per cause."""
        return AuditReport(
            target=target,
            backend=backend,
            environment=environment,
            checks=tuple(self.checks),
            findings=merged_by_cause(self.findings),
        )

    def _add(self, check: AuditCheck, findings: Sequence[Finding]) -> None:
        self.checks.append(check)
        self.findings += findings


def argument_text(node: Node, argument: int, offset: int = 0) -> str:
    """Return text such as ``argument 1 of `mul` (node 4)``."""
    byte = f" at byte {offset}" if offset else ""
    return f"argument {argument}{byte} of `{node.short_name}` (node {node.index})"


def requests_text(batch_sizes: Sequence[int]) -> str:
    """Return ascending batch sizes as text, such as ``1 request`` or ``1 to 3, 5 requests``."""
    return f"{spans(batch_sizes)} request{'' if list(batch_sizes) == [1] else 's'}"


def spans(numbers: Sequence[int]) -> str:
    """Return ascending numbers as text, such as ``1 to 3, 5``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def row_text(wrong: Mismatch, live: int) -> str:
    """Return text such as ``row 3 of next_token_logits (request 1 of 2)``."""
    return f"row {wrong.row} of {wrong.field} (request {wrong.request} of {live})"


def row_facts(wrong: Mismatch) -> dict[str, Any]:
    """Return what ``Check.report`` takes to name a wrong row and its two numbers."""
    before, after = distinct_text(wrong.expected, wrong.got)
    place = {"field": wrong.field, "row": wrong.row, "request": wrong.request}
    return {**place, "before": before, "after": after}
