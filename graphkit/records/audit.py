"""Checks and findings of audits, and the lock file of a target's graphs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar, Protocol, TypeVar

from graphkit.records.graph import GraphRecord, check_graphs
from graphkit.records.record import Count, Duration, Environment, Record

SEVERITIES = ("error", "warning", "note")
"""Severities of findings, the worst first."""


class Audit(StrEnum):
    """Names of the audits.

    ``lock`` compares graphs with a lock file. ``fault`` and ``fingerprint`` find what other
    programs do wrong, see ``graphkit.audit.foreign``. All others are the audits of a target.
    """

    WARMUP = "warmup"
    FROZEN = "frozen"
    FORWARD = "forward"
    POINTERS = "pointers"
    POOL_POISON = "pool-poison"
    FINITE = "finite"
    PADS = "pads"
    SHADOW = "shadow"
    LAUNCH = "launch"
    LOOP = "loop"
    MISSES = "misses"
    WRAPPER = "wrapper"
    ROWS = "rows"
    LOCK = "lock"
    FAULT = "fault"
    FINGERPRINT = "fingerprint"


AUDITS = tuple(
    audit for audit in Audit if audit not in (Audit.LOCK, Audit.FAULT, Audit.FINGERPRINT)
)
"""The audits of a target, in the order in which they run."""
USUAL_AUDITS = tuple(audit for audit in AUDITS if audit is not Audit.ROWS)
"""Those that run unless others are named. Rows that differ by rounding are wrong only for those who
need equal bits: they name ``rows``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What an audit found, with every mode and size that it holds for.

    Attributes:
        audit: Audit that found it, see ``Audit``.
        kind: Class of bug, such as ``frozen value``; one class has the same text in all reports.
        severity: ``error`` if a replay can give a wrong result or crash, ``note`` for what is
            merely unusual, ``warning`` in between.
        mode, batch_size: Captured graph; empty and 0 if the finding is about no single graph. The
            first one if several share the finding.
        modes, batch_sizes: All modes and sizes that share the cause, as a report lists them.
        cause: Findings of one audit, kind and cause are one in a report. Empty if text, kernel and
            line identify the cause.
        names: What the finding is about, such as tensors or input fields.
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
    batch_size: Count = 0
    modes: tuple[str, ...] = ()
    batch_sizes: tuple[Count, ...] = ()
    cause: str = ""
    names: tuple[str, ...] = ()
    text: str
    advice: str = ""
    node: Count | None = None
    kernel: str = ""
    module: str = ""
    source: str = ""
    argument: Count | None = None
    offset: Count | None = None
    before: str = ""
    after: str = ""
    field: str = ""
    row: Count | None = None
    request: Count | None = None


class _WithSeverity(Protocol):
    @property
    def severity(self) -> str: ...


_T = TypeVar("_T", bound=_WithSeverity)


def worst_severity(findings: Iterable[_WithSeverity]) -> str:
    """Return the worst severity of findings or checks; empty if none has one."""
    severities = (finding.severity for finding in findings if finding.severity)
    return min(severities, key=SEVERITIES.index, default="")


def worst_first(findings: Iterable[_T]) -> tuple[_T, ...]:
    """Return errors, then warnings, then notes; those of equal severity keep their order."""
    return tuple(sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity)))


NOT_CHECKED = "not checked: "
"""Begins the text of a check that could not be made; the reason follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditCheck:
    """A check of an audit, with or without findings.

    Attributes:
        audit: Name of the audit, as in ``Finding``.
        mode, batch_size: Captured graph; empty and 0 if the check is about no single graph.
        text: Summary, such as ``captured again: 0 differences in 24 nodes of 2 graphs``.
        findings: Number of findings.
        severity: The worst severity of its findings; empty if there are none.
        seconds: Duration.
    """

    audit: str
    mode: str
    batch_size: Count
    text: str
    findings: Count
    severity: str = ""
    seconds: Duration


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditReport(Record):
    """Result of the audits of a target.

    Attributes:
        target: Name of the target.
        backend: ``cuda`` or ``recorder``.
        environment: Device and versions that the audits ran with.
        checks: Checks in the order in which they ran.
        findings: Findings of all checks, one per cause: errors, then warnings, then notes.
    """

    KIND: ClassVar[str] = "audit"
    target: str
    backend: str
    environment: Environment
    checks: tuple[AuditCheck, ...]
    findings: tuple[Finding, ...]

    @property
    def has_checked(self) -> bool:
        """Whether any check could be made."""
        return any(not check.text.startswith(NOT_CHECKED) for check in self.checks)


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphBaseline(Record):
    """Contents of a target's graphs at a point in time, to detect changes.

    Attributes:
        target: Name of the target.
        environment: Where it was captured.
        fingerprints: Hash of each graph, by its name.
        graphs: The graphs without addresses and times.
        replay_us: Median time of a replay of each graph, in microseconds, by its name; for
            information. Empty where no replay was measured.
    """

    KIND: ClassVar[str] = "lock"
    target: str
    environment: Environment
    fingerprints: Mapping[str, str]
    graphs: tuple[GraphRecord, ...]
    replay_us: Mapping[str, Duration] = field(default_factory=dict)

    def check_contents(self) -> None:
        """Refuse graphs with invalid indices."""
        check_graphs(self.graphs)
