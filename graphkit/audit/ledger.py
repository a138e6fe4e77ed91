"""Where audits write down what they looked at and what they found."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from graphkit.records import AuditCheck, Finding, Node


class Look:
    """One thing that is being looked at. Findings made by it carry its audit, mode and size.

    Attributes:
        text: What was done; to be set before the look ends.
    """

    def __init__(self, audit: str, mode: str, batch_size: int) -> None:
        self.text = ""
        self.findings: list[Finding] = []
        self._facts: dict[str, Any] = {"audit": audit, "mode": mode, "batch_size": batch_size}

    def found(self, kind: str, text: str, *, node: Node | None = None, **facts: Any) -> None:
        """Write a finding down; see ``Finding`` for the facts. ``node`` is told by its own."""
        if node is not None:
            facts |= {"node": node.index, "kernel": node.short_name}
            facts |= {"module": node.module, "source": node.source}
        self.findings.append(Finding(kind=kind, text=text, **(self._facts | facts)))


class Ledger:
    """What the audits of one target looked at and found, in their order."""

    def __init__(self) -> None:
        self.checks: list[AuditCheck] = []
        self.findings: list[Finding] = []

    @contextmanager
    def look(self, audit: str, mode: str = "", batch_size: int = 0) -> Iterator[Look]:
        """Look at one thing; written down when the block ends, unless it raises."""
        look = Look(audit, mode, batch_size)
        began = time.perf_counter()
        yield look
        self.findings += look.findings
        self.checks.append(
            AuditCheck(
                audit=audit,
                mode=mode,
                batch_size=batch_size,
                text=look.text,
                findings=len(look.findings),
                seconds=time.perf_counter() - began,
            )
        )
