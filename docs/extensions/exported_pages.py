"""Exports records to pages of the site: ``tests/data/NAME.json`` becomes ``records/NAME.html``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

from graphkit.records import load_record
from graphkit.views import FORMATS, Export

DATA = Path(__file__).parents[2] / "tests" / "data"
NAMES = "h200-8b-step", "h200-moe", "h200-hybrid", "h200-foreign"


def export_pages(app: Sphinx, error: Exception | None) -> None:
    """Write the pages, after a build that succeeded."""
    if error is not None:
        return
    folder = Path(app.outdir) / "records"
    folder.mkdir(exist_ok=True)
    for name in NAMES:
        export = Export(load_record(DATA / f"{name}.json"))
        (folder / f"{name}.html").write_text(FORMATS[".html"](export), encoding="utf-8")


def setup(app: Sphinx) -> dict[str, Any]:
    """Declare the extension."""
    app.connect("build-finished", export_pages)
    return {"parallel_read_safe": True}
