"""A large graph opens and moves without making, formatting or drawing every row.

Counts work, which 100,000 nodes do not change: rows made, rows formatted, lines drawn.
"""

from __future__ import annotations

from collections import Counter

import pytest

from graphkit.views.pages.graph import _Tree
from graphkit.views.pages.page_model import Page
from graphkit.views.tui.row_list import _CHUNK, RowList

HEIGHT, NUM_LAYERS = 24, 100


@pytest.fixture
def work(monkeypatch):
    """Counts of ``cells`` formatted, node ``rows`` made, and ``lines`` drawn; clear it at will."""
    counts = Counter()

    def count(cls, method, name):
        original = getattr(cls, method)

        def counted(*arguments):
            counts[name] += 1
            return original(*arguments)

        monkeypatch.setattr(cls, method, counted)

    count(Page, "cells", "cells")
    count(_Tree, "_values", "rows")
    count(RowList, "render_line", "lines")
    return counts


def test_a_large_graph_opens_with_the_rows_that_are_seen(huge, drive, work):
    async def script(on):
        return on.lines, len(on.listing.lines)

    lines, rows = drive(huge, script)
    assert any("model" in line for line in lines)
    assert rows <= 16
    assert work["cells"] <= rows
    assert work["rows"] == 1 + NUM_LAYERS, "the modules only"


def test_moving_through_all_rows_formats_those_that_come_into_sight(huge, drive, work):
    async def script(on):
        screen = on.app.screen
        await on.press("right")
        on.listing.open_all()
        screen._show_rows()
        await on.settle()
        work.clear()
        for step, unit in ((1, "page"), (1, "page"), (1, "row"), (-1, "row"), (1, "end")):
            screen.action_move(step, unit)
            await on.pilot.pause()
        return len(on.listing.lines), on.listing.at

    rows, at = drive(huge, script)
    assert rows > 10_000
    assert at == rows - 1
    assert work["rows"] == 0, "moving makes no rows"
    assert work["cells"] <= 3 * (_CHUNK + HEIGHT)
    assert work["lines"] <= 12 * HEIGHT


@pytest.mark.slow
def test_a_verb_formats_each_row_at_most_once(large, drive, work):
    async def script(on):
        await on.press("+")
        rows = len(on.listing.lines)
        assert work["cells"] <= _CHUNK + 2 * HEIGHT, "opening formats no row out of sight"
        for key in ("s", "s", "S", "-", "+"):
            await on.press(key)
        assert work["cells"] < rows, "nor does sorting"
        await on.press("/")
        await on.answer("mlp")
        return rows

    rows = drive(large, script)
    assert rows > 1_000
    assert rows <= work["cells"] <= rows + 2, "a filter looks at every row, once"
