"""What an audit looked at, and what it found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from graphkit.records.environment import Environment
from graphkit.records.json_text import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that is not as it was meant.

    Attributes:
        audit: Which audit found it: ``baked``, ``pointers``, ``pads``, ``shadow``, ``warmup``,
            ``misses`` or ``lock``.
        kind: The class of bug, in a few words such as ``baked value``; the same words for the same
            class everywhere.
        severity: ``error``, or ``warning`` for what may be meant.
        mode, batch_size: The captured graph; empty and 0 where it is about none.
        text: What was found, as one sentence.
        advice: What to do.
        node: Index of the node; ``None`` where it is about none.
        kernel, module, source: The node's.
        argument: Index of the argument; ``None`` where it is about none.
        offset: Where in the argument, in bytes.
        before, after: The two values, decoded; or what was expected and what came.
        field, row, request: Of a row that is wrong; ``None`` where it is about none.
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
    """One thing that was looked at, whether or not something was found.

    Attributes:
        audit: As in ``Finding``.
        mode, batch_size: The captured graph; empty and 0 where it is about none.
        text: What was done, such as ``captured again at the same addresses: 0 differences``.
        findings: How many it led to.
        seconds: How long it took.
    """

    audit: str
    mode: str
    batch_size: int
    text: str
    findings: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditReport(Record):
    """What the audits of a target looked at and found.

    Attributes:
        target: Its name.
        backend: ``cuda`` or ``recorder``.
        environment: Where.
        checks: In their order.
        findings: Empty if all is well.
    """

    KIND: ClassVar[str] = "audit"
    target: str
    backend: str
    environment: Environment
    checks: tuple[AuditCheck, ...]
    findings: tuple[Finding, ...]
