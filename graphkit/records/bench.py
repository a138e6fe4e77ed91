"""Results of a benchmark."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from graphkit.records.record import Environment, Integer, Real, Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """One result of a benchmark.

    Attributes:
        name: Name of the measured quantity.
        value: Its value.
        unit: Its unit, such as ``us``; ``x`` for a ratio.
        bar: Largest value that passes; ``None`` if it is only reported.
        setting: Where a run has several, the one that was measured, such as ``batch 8``. A view
            shows a table per setting.
        variant: What was compared in this setting, such as ``v2``: the row of that table; empty
            for a measure of the setting itself.
    """

    SPARSE: ClassVar[bool] = True
    name: str
    value: Real
    unit: str
    bar: Real | None = None
    setting: str = ""
    variant: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchReport(Record):
    """Results of one run of a benchmark on one machine.

    Attributes:
        name: Name of the benchmark.
        environment: Where it ran.
        settings: Sizes and counts of the run.
        measures: The results, other implementations included.
    """

    KIND: ClassVar[str] = "bench"
    name: str
    environment: Environment
    settings: Mapping[str, Integer | str]
    measures: tuple[Measure, ...]
