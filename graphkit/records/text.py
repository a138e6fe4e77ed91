"""Text of extents and counts, for sentences and tables."""

from __future__ import annotations

from collections.abc import Sequence


def extent(shape: Sequence[int]) -> str:
    """Return a shape as text, such as ``8x1x1``."""
    return "x".join(map(str, shape))


def count_of(number: int, noun: str) -> str:
    """Return a number with its noun, such as ``1 node`` or ``1,200 nodes``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
