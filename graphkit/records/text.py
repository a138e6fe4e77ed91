"""Text of extents, counts and numbers, for sentences and tables."""

from __future__ import annotations

from collections.abc import Sequence

_DIGITS, _MOST_DIGITS = 6, 17


def extent(shape: Sequence[int]) -> str:
    """Return a shape as text, such as ``8x1x1``."""
    return "x".join(map(str, shape))


def count_of(number: int, noun: str) -> str:
    """Return a number with its noun, such as ``1 node``, ``1,200 nodes`` or ``2 batches``."""
    plural = f"{noun}es" if noun.endswith(("s", "ch")) else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def distinct_text(first: float, second: float) -> tuple[str, str]:
    """Return two numbers as text, with as many digits as distinguish them.

    Six significant digits if those differ or if the numbers are equal, at most 17.
    """
    for digits in range(_DIGITS, _MOST_DIGITS + 1):
        one, other = f"{first:.{digits}g}", f"{second:.{digits}g}"
        if one != other:
            return one, other
    return f"{first:.{_DIGITS}g}", f"{second:.{_DIGITS}g}"
