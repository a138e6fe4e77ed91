"""Reports of the same models with weights of several formats, as one report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from graphkit.cli.benchmarks.step_bench import (
    BARE_STEP,
    BOUND,
    DRAFT_WEIGHTS,
    OVER_BOUND,
    TIME_PER_STEP,
    VERIFY_WEIGHTS,
)
from graphkit.records import BenchReport, Measure

_COMPARED = (BARE_STEP, BOUND, OVER_BOUND)
"""Measures of a setting that formats are compared by, where a report has them."""


def compare_formats(reports: Mapping[str, BenchReport]) -> BenchReport:
    """Return one report: a table of formats per batch size, and the measures of each format.

    The last column of a table is the time of the bare step, or of the fastest variant where there
    is none, over that of the first format.

    Args:
        reports: Reports of ``StepBench`` by the name of the format, at least two.
    """
    first = next(iter(reports.values()))
    measures: list[Measure] = []
    for setting in dict.fromkeys(measure.setting for measure in first.measures if measure.setting):
        rows = [_row(reports, name, setting) for name in reports]
        measures += [measure for column in zip(*rows, strict=True) for measure in column]
    for name, report in reports.items():
        for measure in report.measures:
            own = f"{measure.setting}, {name}" if measure.setting else name
            measures.append(replace(measure, setting=own))
    kept = {name: value for name, value in first.settings.items() if name != "quantize"}
    settings = {**kept, "formats": ", ".join(reports)}
    return replace(first, settings=settings, measures=tuple(measures))


def _row(reports: Mapping[str, BenchReport], name: str, setting: str) -> list[Measure]:
    """Return what a format is compared by in one setting."""
    row = Measure(name="", value=0.0, unit="ms", setting=setting, variant=name)
    measures = []
    weights = [m for m in reports[name].measures if m.name in (VERIFY_WEIGHTS, DRAFT_WEIGHTS)]
    if weights:
        total = sum(measure.value for measure in weights)
        measures.append(replace(row, name="weights", value=total, unit=weights[0].unit))
    measures.append(replace(row, name="fastest step", value=_fastest(reports[name], setting)))
    measures += [
        replace(measure, variant=name)
        for measure in reports[name].measures
        if measure.setting == setting and measure.name in _COMPARED
    ]
    first, *_ = reports
    ratio = _time(reports[name], setting) / _time(reports[first], setting)
    return [*measures, replace(row, name=f"over {first}", value=ratio, unit="x")]


def _fastest(report: BenchReport, setting: str) -> float:
    steps = (m for m in report.measures if (m.setting, m.name) == (setting, TIME_PER_STEP))
    return min(measure.value for measure in steps)


def _time(report: BenchReport, setting: str) -> float:
    """Return the time of the bare step, or of the fastest variant."""
    bare = (m.value for m in report.measures if (m.setting, m.name) == (setting, BARE_STEP))
    return next(bare, None) or _fastest(report, setting)
