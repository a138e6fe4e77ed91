"""The picture of the documentation shows the screen as it is."""

from __future__ import annotations

import asyncio
import runpy
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

DOCS = Path(__file__).parents[2] / "docs"


def shown(svg):
    return [text.replace("\xa0", " ").strip() for text in ET.fromstring(svg).itertext()]


@pytest.mark.slow
def test_the_picture_is_up_to_date_and_not_taller_than_wide():
    taken = asyncio.run(runpy.run_path(str(DOCS / "figures" / "screen.py"))["picture"]())
    stored = (DOCS / "inspect.svg").read_text(encoding="utf-8")
    begin = next(at for at, text in enumerate(shown(stored)) if text == "graphkit inspect")
    assert shown(taken)[begin:] == shown(stored)[begin:], "run docs/figures/screen.py again"
    _, _, width, height = map(float, ET.fromstring(stored).get("viewBox").split())
    assert height <= width
