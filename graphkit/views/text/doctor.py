"""Findings of ``graphkit doctor`` as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text


@dataclass(frozen=True, slots=True)
class Fact:
    """One line of the doctor's report.

    Attributes:
        what: A library, a device or a capability.
        found: Its version or name; empty if it is missing.
        works: True if the features that need it work.
        remedy: What to do if they do not.
    """

    what: str
    found: str
    works: bool
    remedy: str = ""


def doctor_view(facts: Sequence[Fact]) -> RenderableType:
    """Return a table of the facts, and below it what to do about missing ones."""
    table = Table(box=None, pad_edge=False, show_header=False)
    for fact in facts:
        mark = Text("ok", style="green") if fact.works else Text("--", style="yellow")
        table.add_row(mark, fact.what, fact.found or "missing")
    remedies = [
        Text(f"{fact.what}: {fact.remedy}") for fact in facts if not fact.works and fact.remedy
    ]
    return Group(table, *remedies)
