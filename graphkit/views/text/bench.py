"""A BenchReport as text."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from graphkit.records import BenchReport, Measure
from graphkit.views.formatting import facts_table, plain, text_table

_CPU_NOTE = "The device is a CPU, where the recorder runs graphs: times say nothing about a GPU."


def bench_view(report: BenchReport) -> RenderableType:
    """Return a table per setting, the other measures with their bars, environment and settings."""
    parts: list[RenderableType] = [Text(plain(report.name), style="bold"), Text()]
    for setting in dict.fromkeys(measure.setting for measure in report.measures if measure.setting):
        parts += _setting([measure for measure in report.measures if measure.setting == setting])
    rest = [measure for measure in report.measures if not measure.setting]
    if rest:
        parts += [facts_table((m.name, _value(m)) for m in rest), Text()]
    return Group(*parts, *_circumstances(report))


def _setting(measures: Sequence[Measure]) -> Iterator[RenderableType]:
    """Yield the table of a setting, a row per variant, and below it what has no variant."""
    cells = {(measure.variant, measure.name): measure for measure in measures if measure.variant}
    if cells:
        units = {measure.name: measure.unit for measure in cells.values()}
        table = text_table([""], title=plain(measures[0].setting))
        for name, unit in units.items():
            table.add_column(Text(f"{plain(name)}\n{plain(unit)}"), justify="right")
        for variant in dict.fromkeys(variant for variant, _ in cells):
            row = (cells.get((variant, name)) for name in units)
            texts = ("" if cell is None else _digits(cell.value) for cell in row)
            table.add_row(Text(plain(variant)), *map(Text, texts))
        yield table
    rest = (measure for measure in measures if not measure.variant)
    facts = [(measure.name, _value(measure)) for measure in rest]
    if facts:
        yield facts_table(facts)
    yield Text()


def _circumstances(report: BenchReport) -> Iterator[Text]:
    where = report.environment
    versions = {"driver": where.driver, "torch": where.torch, "triton": where.triton}
    parts = [where.device, *(f"{name} {version}" for name, version in versions.items() if version)]
    yield Text(plain(", ".join(parts)))
    yield Text(plain(", ".join(f"{name} {value}" for name, value in report.settings.items())))
    if where.device == "cpu":
        yield Text(_CPU_NOTE, style="yellow")


def _value(measure: Measure) -> str:
    """Return a value with its unit and, if it has one, its bar and whether that holds."""
    value = f"{_digits(measure.value)} {measure.unit}".rstrip()
    if measure.bar is None:
        return value
    verdict = "holds" if measure.value <= measure.bar else "missed"
    return f"{value}, <= {_digits(measure.bar)} {measure.unit}: {verdict}"


def _digits(value: float) -> str:
    """Return a number with four digits or all that are before the point; a count as it is."""
    if not math.isfinite(value) or value == int(value):
        return f"{value:,.0f}"
    return f"{value:,.{max(0, 4 - len(str(int(abs(value)))))}f}"
