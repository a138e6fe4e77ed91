"""Source lines that made nodes as text, the one whose nodes take most time first."""

from __future__ import annotations

import re
from collections.abc import Iterable

from graphkit.records import Node, count_of

_FILE_AND_LINE = re.compile(r"[^/\\]+\.py:\d+")
_MOST = 2
"""Lines to name in a sentence; more are counted."""


def source_cell(nodes: Iterable[Node]) -> str:
    """Return file and line of the most expensive source, and the number of others.

    Such as ``layers.py:110`` or ``model.py:129 +8``; empty if no node has a source.
    """
    first, *others = _by_time(nodes) or [""]
    found = _FILE_AND_LINE.search(first)
    name = found[0] if found else first
    return f"{name} +{len(others)}" if others else name


def source_sentence(nodes: Iterable[Node]) -> str:
    """Return the most expensive sources with their functions; empty if no node has a source."""
    lines = _by_time(nodes)
    others = len(lines) - _MOST
    more = [f"and {count_of(others, 'more line')}"] if others > 0 else []
    return ", ".join([*lines[:_MOST], *more])


def _by_time(nodes: Iterable[Node]) -> list[str]:
    times: dict[str, float] = {}
    for node in nodes:
        if node.source:
            times[node.source] = times.get(node.source, 0.0) + (node.duration_us or 0.0)
    return sorted(times, key=lambda line: -times[line])
