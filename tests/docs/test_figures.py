"""The drawn figures are up to date, and tables of measurements show committed results alone."""

import re
import runpy

import pytest

pytest.importorskip("sphinx.application")

import exported_pages
from documentation_blocks import DOCS, PAGES
from measured_tables import RESULTS, measures_of, report_of, rows_of, source_of

DRAWN = runpy.run_path(str(DOCS / "figures" / "draw.py"))["FIGURES"]


@pytest.mark.parametrize("draw", DRAWN, ids=lambda draw: draw.__name__)
def test_a_figure_is_as_drawn_and_shown_once(draw):
    path = DOCS / "figures" / f"{draw.__name__}.svg"
    assert path.read_text() == draw().svg()
    assert sum(page.read_text().count(f":file: figures/{path.name}") for page in PAGES) == 1


def test_a_row_has_a_title_and_the_value_of_each_column():
    measures = measures_of(report_of("step"))
    (row,) = rows_of(["v1 | v1: time per step"], ["chain, 1", "chain, 8"], measures)
    values = [measures[f"chain, {size}, v1: time per step"].value for size in (1, 8)]
    assert row == ["v1", *(f"{value:.2f} ms" for value in values)]


def test_an_unknown_measure_is_an_error():
    with pytest.raises(KeyError, match="chain, 1, nothing"):
        rows_of(["title | nothing"], ["chain, 1"], measures_of(report_of("step")))


def test_every_result_names_its_source():
    sources = {path.stem: source_of(path.stem) for path in RESULTS.glob("*.json")}
    assert sources["refresh"] == "tools/bench/refresh.py"
    assert {name for name, source in sources.items() if source == "graphkit bench"} <= {
        name for name in sources if name.startswith("llama-8b")
    }


def test_a_page_of_a_record_is_linked():
    texts = "".join(page.read_text() for page in PAGES)
    assert set(re.findall(r'href="records/([\w-]+)\.html"', texts)) == set(exported_pages.NAMES)
