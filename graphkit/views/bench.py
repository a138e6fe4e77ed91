"""A BenchReport as people see it."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from graphkit.records import BenchReport, Measure


def bench_view(report: BenchReport) -> RenderableType:
    """The figures, the bars that they are held against, and what they were measured on."""
    facts = report.environment
    table = Table(title=report.name, title_justify="left", title_style="bold")
    table.add_column("measure")
    table.add_column("value", justify="right")
    table.add_column("bar", justify="right")
    table.add_column("")
    for measure in report.measures:
        table.add_row(measure.name, _figure(measure.value, measure.unit), *_against_bar(measure))
    settings = ", ".join(f"{name} {value}" for name, value in report.settings.items())
    return Group(
        table,
        Text(f"{facts.device}, driver {facts.driver}, torch {facts.torch}, triton {facts.triton}"),
        Text(settings),
    )


def _against_bar(measure: Measure) -> tuple[str, Text]:
    if measure.bar is None:
        return "", Text("")
    holds = measure.value <= measure.bar
    verdict = Text("holds", style="green") if holds else Text("missed", style="bold red")
    return f"<= {_figure(measure.bar, measure.unit)}", verdict


def _figure(value: float, unit: str) -> str:
    return f"{value:.2f} {unit}"
