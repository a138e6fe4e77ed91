"""Renders the sections ``Attributes`` and ``Shapes`` of docstrings as lists.

napoleon turns each name of ``Attributes`` into one field, and leaves ``Shapes`` as text. Here both
may describe several names in one entry, and an entry may continue on indented lines.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import takewhile
from typing import Any

from sphinx.application import Sphinx

SECTION = re.compile(r"(Attributes|Shapes):$")
NAMES = re.compile(r"(\w+(?:, \w+)*): (?=\S)")


def as_lists(lines: list[str]) -> list[str]:
    """Return the lines of a docstring with both sections rewritten as lists."""
    return list(_rewritten(lines))


def _rewritten(lines: list[str]) -> Iterator[str]:
    rest = list(lines)
    while rest:
        line = rest.pop(0)
        if not (match := SECTION.match(line)):
            yield line
            continue
        body = list(takewhile(lambda each: not each or each.startswith("    "), rest))
        del rest[: len(body)]
        yield from (f".. rubric:: {match[1]}", "")
        for each in body:
            text = each[4:]
            continues = not text or text.startswith(" ")
            yield f"  {text.strip()}".rstrip() if continues else f"- {_marked(text)}"
        yield ""


def _marked(entry: str) -> str:
    """Return an entry with the names before its colon as code."""
    match = NAMES.match(entry)
    if not match:
        return entry
    names = ", ".join(f"``{name}``" for name in match[1].split(", "))
    return f"{names}: {entry[match.end() :]}"


def rewrite_sections(_app: Sphinx, *event: Any) -> None:
    """Rewrite the docstring of an ``autodoc-process-docstring`` event in place."""
    lines = event[-1]
    lines[:] = as_lists(lines)


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension. It runs before napoleon, which has priority 500."""
    app.connect("autodoc-process-docstring", rewrite_sections, priority=400)
    return {"parallel_read_safe": True}
