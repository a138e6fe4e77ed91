"""What ``graphkit doctor`` found, as people see it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text


@dataclass(frozen=True, slots=True)
class Fact:
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


def doctor_view(facts: Sequence[Fact]) -> RenderableType:
    """A table of facts, and the remedies below it."""
    table = Table(box=None, pad_edge=False, show_header=False)
    for fact in facts:
        mark = Text("ok", style="green") if fact.works else Text("--", style="yellow")
        table.add_row(mark, fact.what, fact.found or "missing")
    remedies = [
        Text(f"{fact.what}: {fact.remedy}") for fact in facts if not fact.works and fact.remedy
    ]
    return Group(table, *remedies)
