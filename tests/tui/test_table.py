"""Text in cells: which columns are shown, how wide, and the lines around them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from graphkit.tui.clip import clip, clip_left
from graphkit.tui.listing import Listing, Look
from graphkit.tui.standing import packed, standing
from graphkit.tui.table import GAP, Place, fit, heads, laid_out, row_cells, wanted_widths
from graphkit.views.figures import plain
from graphkit.views.pages.page import Beside, Column, Item, Page

FUZZ = settings(deadline=None, derandomize=True, max_examples=60)
COLUMNS = (
    Column(name="name", least=10),
    Column(name="us", is_number=True, rank=1),
    Column(name="grid", rank=3),
    Column(name="kind", rank=2, most=6),
)
WANTED = (30, 8, 9, 12)


def shown(room):
    return {COLUMNS[place.at].name: place.width for place in fit(COLUMNS, WANTED, room)}


def test_the_least_important_column_goes_first():
    assert list(shown(100)) == ["name", "us", "grid", "kind"]
    assert list(shown(10 + 8 + 9 + 6 + 3 * GAP)) == ["name", "us", "grid", "kind"]
    assert list(shown(10 + 8 + 9 + 6 + 3 * GAP - 1)) == ["name", "us", "kind"]
    assert list(shown(10 + 8 + 6 + 2 * GAP - 1)) == ["name", "us"]
    assert list(shown(10 + 8 + GAP - 1)) == ["name"]


def test_one_column_takes_what_the_others_leave():
    assert shown(60) == {"name": 60 - 8 - 9 - 6 - 3 * GAP, "us": 8, "grid": 9, "kind": 6}


def test_columns_that_always_stay_share_what_there_is():
    both = (Column(name="before"), Column(name="after"))
    assert fit(both, (24, 24), 20) == (Place(0, 9), Place(1, 9))
    assert fit(both, (4, 24), 20) == (Place(0, 4), Place(1, 14))


COLUMN = st.builds(
    Column,
    name=st.just("c"),
    rank=st.integers(0, 3),
    most=st.integers(1, 20),
    least=st.sampled_from([0, 0, 12]),
)


@FUZZ
@given(st.lists(st.tuples(COLUMN, st.integers(1, 40)), min_size=1, max_size=6), st.integers(20, 90))
def test_no_line_is_wider_than_its_room(pairs, room):
    columns, wanted = zip(*pairs, strict=True)
    places = fit(columns, wanted, room)
    assert places
    if sum(bool(column.least) for column in columns) <= 1:
        assert sum(place.width for place in places) + GAP * (len(places) - 1) <= room
    assert [place.at for place in places] == sorted({place.at for place in places})
    shown = {place.at for place in places}
    ranks = [columns[at].rank for at in shown]
    assert all(columns[at].rank >= max(ranks) for at in set(range(len(columns))) - shown)


@FUZZ
@given(st.text().map(plain), st.integers(0, 30))
def test_clipped_text_fills_its_cells_exactly(text, width):
    assert cell_len(clip(text, width)) == width
    if cell_len(text) <= width:
        assert clip(text, width).startswith(text)
    elif width:
        assert "…" in clip(text, width)


@FUZZ
@given(st.text().map(plain), st.integers(-2, 30))
def test_text_clipped_on_the_left_keeps_its_end(text, width):
    left = clip_left(text, width)
    assert cell_len(left) <= max(width, 0) or left == text
    assert text.endswith(left.removeprefix("…"))


def test_wide_characters_are_counted_as_the_terminal_does():
    assert clip("日本語", 5) == "日本…"
    assert clip("日本語", 4) == "日… "
    assert clip_left("日本語", 4) == "…語"


def row(*cells, room=50):
    return "".join(laid_out(cells, COLUMNS, fit(COLUMNS, WANTED, room)))


def test_numbers_stand_at_the_right_and_text_at_the_left():
    assert row("a", "1.0", "8x1", "op") == f"{'a':21}  {'1.0':>8}  {'8x1':9}  op    "


def test_the_last_text_of_a_row_takes_the_room_that_is_left():
    assert row("a" * 40, "", "", "") == "a" * 40 + " " * 10
    assert row("a", "1.0", "x" * 15, "") == f"{'a':21}  {'1.0':>8}  {'x' * 15:17}"


def listing(**look):
    items = (
        Item(
            key="m",
            values=("m", 1, "8x1", "module"),
            inside=lambda: [Item(key="leaf", values=("leaf", None, None, "op"))],
        ),
    )
    page = Page(
        title="here", columns=COLUMNS, items=items,
        beside=Beside(count=3, at=1, make=lambda at: page),
    )  # fmt: skip
    return Listing(page, Look(**look))


def test_rows_say_how_deep_they_are_and_whether_they_are_open():
    closed, opened = listing(), listing(opened=frozenset("m"))
    assert [row_cells(closed, line)[0] for line in closed.lines] == ["▸ m"]
    assert [row_cells(opened, line)[0] for line in opened.lines] == ["▾ m", "    leaf"]


def test_a_page_without_a_tree_has_no_marks():
    flat = Listing(Page(title="", columns=COLUMNS[:1], items=(Item(key="a", values=("a",)),)))
    assert row_cells(flat, flat.lines[0]) == ("a",)


@pytest.mark.parametrize(
    ("look", "expected"),
    [
        ({}, ("name", "us", "grid", "kind")),
        ({"sort": "us"}, ("name", "us ↓", "grid", "kind")),
        ({"sort": "us", "is_reversed": True}, ("name", "us ↑", "grid", "kind")),
        ({"sort": "name"}, ("name ↑", "us", "grid", "kind")),
        ({"sort": "kind", "is_reversed": True}, ("name", "us", "grid", "kind ↓")),
    ],
)
def test_the_head_of_the_sorted_column_shows_which_way_values_go(look, expected):
    assert heads(listing(**look)) == expected


def test_widths_are_those_of_the_widest_text_that_is_shown():
    assert wanted_widths(listing()) == [4, 2, 4, 6]
    assert wanted_widths(listing(opened=frozenset("m"))) == [8, 2, 4, 6]


def test_the_standing_says_what_is_shown_and_how():
    text = standing(
        ("record", "here"), listing(sort="us", is_reversed=True, filter="m", search="e"), 200
    )
    assert text == ("record > here · row 1/1 · tab 2/3 · sort us reversed · filter m · match 1/1 e")


@pytest.mark.parametrize("width", range(1, 60))
def test_the_way_here_is_cut_before_the_place(width):
    text = standing(("a long record", "here"), listing(), width)
    assert "row 1/1 · tab 2/3" in text
    assert cell_len(text) <= max(width, len("row 1/1 · tab 2/3"))


def test_an_empty_listing_stands_nowhere():
    assert standing((), listing(filter="nonsense"), 80).startswith("row 0/0 · ")


@FUZZ
@given(st.lists(st.text("ab 日", min_size=1, max_size=12), max_size=8), st.integers(1, 40))
def test_facts_are_packed_whole_and_in_order(facts, width):
    lines = packed(facts, width).splitlines()
    assert [fact for line in lines for fact in line.split(" · ")] == facts
    assert all(cell_len(line) <= width or " · " not in line for line in lines)
