"""Reports of the same models with weights of several formats, as one report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from graphkit.cli.benchmarks.step_measures import (
    BARE_STEP,
    BOUND,
    DRAFT_WEIGHTS,
    OVER_BOUND,
    TIME_PER_STEP,
    VERIFY_WEIGHTS,
    cell,
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
    settings = dict.fromkeys(each.setting for each in first.measures if each.setting)
    measures = [
        measure
        for setting in settings
        for found in zip(*(_row(reports, name, setting) for name in reports), strict=True)
        for measure in found
    ]
    for name, report in reports.items():
        measures += [_named(measure, name) for measure in report.measures]
    kept = {name: value for name, value in first.settings.items() if name != "quantize"}
    return replace(
        first, settings={**kept, "formats": ", ".join(reports)}, measures=tuple(measures)
    )


def _row(reports: Mapping[str, BenchReport], name: str, setting: str) -> Iterator[Measure]:
    """Yield what a format is compared by in one setting."""
    weights = [
        each for each in reports[name].measures if each.name in (VERIFY_WEIGHTS, DRAFT_WEIGHTS)
    ]
    if weights:
        total = sum(each.value for each in weights)
        yield cell(setting, name, "weights", total, weights[0].unit)
    yield cell(setting, name, "fastest step", _fastest(reports[name], setting), "ms")
    for measure in reports[name].measures:
        if measure.setting == setting and measure.name in _COMPARED:
            yield replace(measure, variant=name)
    first, *_ = reports
    ratio = _time(reports[name], setting) / _time(reports[first], setting)
    yield cell(setting, name, f"over {first}", ratio, "x")


def _fastest(report: BenchReport, setting: str) -> float:
    return min(
        each.value
        for each in report.measures
        if each.setting == setting and each.name == TIME_PER_STEP
    )


def _time(report: BenchReport, setting: str) -> float:
    """Return the time of the bare step, or of the fastest variant."""
    bare = (m.value for m in report.measures if m.setting == setting and m.name == BARE_STEP)
    return next(bare, None) or _fastest(report, setting)


def _named(measure: Measure, name: str) -> Measure:
    """Return a measure of a format, in a setting of its own."""
    return replace(measure, setting=f"{measure.setting}, {name}" if measure.setting else name)
