"""Lanes for spans of time, so that those which overlap are apart."""

from __future__ import annotations

from collections.abc import Iterable


def lanes_of(spans: Iterable[tuple[float, float]]) -> list[int]:
    """Return for each span the first lane, from 1, that is free when it begins.

    Args:
        spans: Begin and end of each, in the order of their begins.
    """
    ends: list[float] = []
    found = []
    for begin, end in spans:
        lane = next((at for at, reached in enumerate(ends) if reached <= begin), len(ends))
        ends[lane : lane + 1] = [end]
        found.append(lane + 1)
    return found
