"""Names of measured times: one per figure, on every page, table and difference of records."""

from __future__ import annotations

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
"""By the name of the field. What each of them measures is in docs/inspect.md."""


def figure_name(field: str) -> str:
    """Return the name of a figure, without its unit: ``gaps`` for ``gap_us``."""
    return _TIMES.get(field, field.replace("_", " "))


def figure_heading(field: str) -> str:
    """Return the name of a time with its unit, as columns have it: ``gaps us`` for ``gap_us``."""
    unit = field.rpartition("_")[2]
    return f"{_TIMES[field]} {unit}" if field in _TIMES else figure_name(field)
