"""Checks and findings of audits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from graphkit.records.environment import Environment
from graphkit.records.json_text import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A problem that an audit found.

    Attributes:
        audit: Audit that found it: ``baked``, ``pointers``, ``pads``, ``shadow``, ``warmup``,
            ``misses`` or ``lock``.
        kind: Class of bug, such as ``baked value``; one class has the same text in all reports.
        severity: ``error``, or ``warning`` for what may be intended.
        mode, batch_size: Captured graph; empty and 0 if the finding is about no single graph.
        text: What happened and what was expected, as one sentence or a few.
        advice: What to do.
        node: Index of the node; ``None`` if the finding is about no node.
        kernel, module, source: Kernel, module path and source line of the node.
        argument: Index of the argument; ``None`` if the finding is about no argument.
        offset: Bytes from the beginning of the argument.
        before, after: The two values as text, or the expected and the actual value.
        field, row, request: Output or state row that is wrong; ``None`` if there is none.
    """

    audit: str
    kind: str
    severity: str = "error"
    mode: str = ""
    batch_size: int = 0
    text: str
    advice: str = ""
    node: int | None = None
    kernel: str = ""
    module: str = ""
    source: str = ""
    argument: int | None = None
    offset: int | None = None
    before: str = ""
    after: str = ""
    field: str = ""
    row: int | None = None
    request: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditCheck:
    """A check of an audit, with or without findings.

    Attributes:
        audit: Name of the audit, as in ``Finding``.
        mode, batch_size: Captured graph; empty and 0 if the check is about no single graph.
        text: Summary, such as ``captured again: 0 differences in 24 nodes of 2 graphs``.
        findings: Number of findings.
        seconds: Duration.
    """

    audit: str
    mode: str
    batch_size: int
    text: str
    findings: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditReport(Record):
    """Result of the audits of a target.

    Attributes:
        target: Name of the target.
        backend: ``cuda`` or ``recorder``.
        environment: Device and versions that the audits ran with.
        checks: Checks in the order in which they ran.
        findings: Findings of all checks.
    """

    KIND: ClassVar[str] = "audit"
    target: str
    backend: str
    environment: Environment
    checks: tuple[AuditCheck, ...]
    findings: tuple[Finding, ...]
