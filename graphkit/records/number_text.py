"""Numbers as text."""

from __future__ import annotations

_DIGITS, _MOST_DIGITS = 6, 17


def distinct_text(first: float, second: float) -> tuple[str, str]:
    """Return two numbers as text, with as many digits as it takes to tell them apart.

    Six significant digits if those differ or if the numbers are equal, at most 17.
    """
    for digits in range(_DIGITS, _MOST_DIGITS + 1):
        one, other = f"{first:.{digits}g}", f"{second:.{digits}g}"
        if one != other:
            return one, other
    return f"{first:.{_DIGITS}g}", f"{second:.{_DIGITS}g}"
