"""A BenchReport as text."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from graphkit.records import BenchReport, Measure


def bench_view(report: BenchReport) -> RenderableType:
    """Return the measures with their bars, the environment, and the settings."""
    where = report.environment
    table = Table(title=report.name, title_justify="left", title_style="bold")
    table.add_column("measure")
    table.add_column("value", justify="right")
    table.add_column("bar", justify="right")
    table.add_column("")
    for measure in report.measures:
        table.add_row(measure.name, _number(measure.value, measure.unit), *_bar(measure))
    settings = ", ".join(f"{name} {value}" for name, value in report.settings.items())
    return Group(
        table,
        Text(f"{where.device}, driver {where.driver}, torch {where.torch}, triton {where.triton}"),
        Text(settings),
    )


def _bar(measure: Measure) -> tuple[str, Text]:
    if measure.bar is None:
        return "", Text("")
    is_met = measure.value <= measure.bar
    verdict = Text("holds", style="green") if is_met else Text("missed", style="bold red")
    return f"<= {_number(measure.bar, measure.unit)}", verdict


def _number(value: float, unit: str) -> str:
    return f"{value:.2f} {unit}"
