"""The directives ``measures`` and ``results``: tables of what ``tools/bench`` has measured.

Figures come from the files below ``tools/bench/results``, with the GPU and the versions of the
run::

    ```{measures} step
    :columns: chain, 1 | chain, 8
    host in the loop | v1: time per step
    ```

A line has a title and the name of a measure. The column before the name, if there is one, gives the
measure's setting. A measure that does not exist fails the build.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from graphkit.records import BenchReport, Measure

RESULTS = Path(__file__).parents[2] / "tools" / "bench" / "results"


def report_of(name: str) -> BenchReport:
    """Return a committed result."""
    return BenchReport.from_json((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def measures_of(report: BenchReport) -> dict[str, Measure]:
    """Return the measures of a result by setting, variant and name."""
    return {
        ", ".join(filter(None, [each.setting, each.variant, each.name])): each
        for each in report.measures
    }


def text_of(measure: Measure) -> str:
    """Return a value with its unit."""
    value = measure.value
    is_whole = value == int(value) or abs(value) >= 1000
    digits = 0 if is_whole else 1 if abs(value) >= 100 else 2
    return f"{value:,.{digits}f} {measure.unit}".strip()


def rows_of(
    lines: list[str], columns: list[str], measures: Mapping[str, Measure]
) -> list[list[str]]:
    """Return the cells of each line: its title, and the value of each column.

    Raises:
        KeyError: There is no such measure.
    """
    rows = []
    for line in lines:
        title, name = (part.strip() for part in line.split("|"))
        keys = [f"{column}, {name}" if column else name for column in columns]
        rows.append([title, *(text_of(measures[key]) for key in keys)])
    return rows


def source_of(name: str) -> str:
    """Return what measures a result: a script of its name, or of the first words of its name."""
    root, words = RESULTS.parents[2], name.split("_")
    names = ["_".join(words[:count]) for count in range(len(words), 0, -1)]
    scripts = (
        f"{folder}/{name}.py" for name in names for folder in ("tools/bench", "tests/support")
    )
    return next((script for script in scripts if (root / script).exists()), "graphkit bench")


def table(header: list[str], rows: list[list[str]]) -> nodes.table:
    """Return a table of text."""
    group = nodes.tgroup(cols=len(header))
    group += [nodes.colspec(colwidth=1) for _ in header]
    head, body = nodes.thead(), nodes.tbody()
    for part, cells in [(head, header), *((body, row) for row in rows)]:
        entries = [nodes.entry("", nodes.paragraph(text=cell)) for cell in cells]
        part += nodes.row("", *entries)
    group += [head, body]
    return nodes.table("", group, classes=["measures"])


class Measures(SphinxDirective):
    """A table of chosen measures of one result, with where they come from."""

    required_arguments = 1
    has_content = True
    option_spec: ClassVar[Any] = {"columns": str}

    def run(self) -> list[nodes.Node]:
        """Return the table and a line about its source."""
        (name,) = self.arguments
        self.env.note_dependency(str(RESULTS / f"{name}.json"))
        report = report_of(name)
        columns = [each.strip() for each in self.options.get("columns", "").split("|")]
        try:
            rows = rows_of(list(self.content), columns, measures_of(report))
        except KeyError as error:
            raise self.error(f"{name}.json has no measure {error}.") from error
        here = report.environment
        source = nodes.paragraph("", f"{here.device}, driver {here.driver}, torch {here.torch}: ")
        source += [nodes.literal(text=source_of(name)), nodes.Text(", ")]
        source += nodes.literal(text=f"results/{name}.json")
        return [table(["", *(each or "measured" for each in columns)], rows), source]


class Results(SphinxDirective):
    """A table of all results."""

    def run(self) -> list[nodes.Node]:
        """Return the table."""
        rows = []
        for path in sorted(RESULTS.glob("*.json")):
            report = report_of(path.stem)
            here = report.environment
            versions = f"{here.device}, driver {here.driver}, torch {here.torch}"
            rows.append([path.name, report.name, source_of(path.stem), versions])
        return [table(["results/", "what", "measured by", "on"], rows)]


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension."""
    app.add_directive("measures", Measures)
    app.add_directive("results", Results)
    return {"parallel_read_safe": True}
