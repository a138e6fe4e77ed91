"""What a benchmark measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from graphkit.records.environment import Environment
from graphkit.records.json_text import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """One figure of a benchmark.

    Attributes:
        name: What was measured.
        value: The figure.
        unit: Its unit, such as ``us``; ``x`` for a ratio.
        bar: The largest value that we allow ourselves; ``None`` for what is only shown.
    """

    name: str
    value: float
    unit: str
    bar: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchReport(Record):
    """What a benchmark measured, in one run on one machine.

    Attributes:
        name: The benchmark.
        environment: Where.
        settings: What was run: sizes and counts.
        measures: The figures, rivals beside ours.
    """

    KIND: ClassVar[str] = "bench"
    name: str
    environment: Environment
    settings: Mapping[str, int | str]
    measures: tuple[Measure, ...]
