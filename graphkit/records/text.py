"""Text of shapes, counts, numbers and names of measured times, for sentences and tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_DIGITS, _MOST_DIGITS = 6, 17
"""17 significant digits distinguish any two floats."""
_TIMES = {
    "capture_ms": "capture",
    "replay_us": "replay",
    "eager_us": "eager",
    "unprofiled_us": "unprofiled",
    "p50_us": "profiled p50",
    "p95_us": "profiled p95",
    "busy_us": "busy",
    "gap_us": "gaps",
    "critical_us": "critical path",
}
"""Names of measured times, by field. What each of them measures is in docs/inspect.md."""


def extent(shape: Sequence[int]) -> str:
    """Return a shape as text, such as ``8x1x1``."""
    return "x".join(map(str, shape))


def tensor_text(dtype: object, shape: Sequence[int]) -> str:
    """Return the dtype and shape of a tensor as text, such as ``float32 [8, 64]``."""
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


def count_of(number: int, noun: str) -> str:
    """Return a number with its noun, such as ``1 node``, ``1,200 nodes`` or ``2 batches``."""
    plural = f"{noun}es" if noun.endswith(("s", "ch")) else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def listed(names: Iterable[str], most: int = 20) -> str:
    """Return names separated by commas; those beyond ``most`` are counted."""
    known = list(names)
    more = [f"and {len(known) - most:,} more"] if len(known) > most else []
    return ", ".join([*known[:most], *more])


def distinct_text(first: float, second: float) -> tuple[str, str]:
    """Return two numbers as text, with as many digits as distinguish them.

    Six significant digits if those differ or if the numbers are equal, at most 17.
    """
    for digits in range(_DIGITS, _MOST_DIGITS + 1):
        one, other = f"{first:.{digits}g}", f"{second:.{digits}g}"
        if one != other:
            return one, other
    return f"{first:.{_DIGITS}g}", f"{second:.{_DIGITS}g}"


def figure_name(field: str) -> str:
    """Return the name of a figure, without its unit: ``gaps`` for ``gap_us``."""
    return _TIMES.get(field, field.replace("_", " "))


def figure_heading(field: str) -> str:
    """Return the name of a time with its unit, as columns have it: ``gaps us`` for ``gap_us``."""
    unit = field.rpartition("_")[2]
    return f"{_TIMES[field]} {unit}" if field in _TIMES else figure_name(field)
