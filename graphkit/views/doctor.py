"""What ``graphkit doctor`` found, as people see it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor's.

    Attributes:
        what: A library, a device or an ability.
        found: Its version or name; empty if it is missing.
        works: Whether what needs it works.
        remedy: What to do if it does not.
    """

    what: str
    found: str
    works: bool
    remedy: str = ""


def doctor_view(findings: Sequence[Finding]) -> RenderableType:
    """A table of findings, and the remedies below it."""
    table = Table(box=None, pad_edge=False, show_header=False)
    for finding in findings:
        mark = Text("ok", style="green") if finding.works else Text("--", style="yellow")
        table.add_row(mark, finding.what, finding.found or "missing")
    remedies = [
        Text(f"{finding.what}: {finding.remedy}")
        for finding in findings
        if not finding.works and finding.remedy
    ]
    return Group(table, *remedies)
