"""Layout of columns, and the texts around the list: the path of pages, the status and the note."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st
from rich.cells import cell_len

from graphkit.records import Node
from graphkit.views.formatting import plain
from graphkit.views.pages.page_model import Column, Page, Row, Siblings
from graphkit.views.text.page import GAP, ColumnSpan, align_cells, clip, fit, widest
from graphkit.views.tui.listing import Listing, ViewState
from graphkit.views.tui.texts import common_module, fold, pack, place_line

FUZZ = settings(deadline=None, derandomize=True, max_examples=60)

COLUMNS = (
    Column(name="name", least=10),
    Column(name="us", is_number=True, rank=1),
    Column(name="grid", rank=3),
    Column(name="kind", rank=2, most=6),
)

WANTED = (30, 8, 9, 12)


def shown(room):
    return {COLUMNS[span.index].name: span.width for span in fit(COLUMNS, WANTED, room)}


def test_the_least_important_column_goes_first():
    assert list(shown(100)) == ["name", "us", "grid", "kind"]
    assert list(shown(10 + 8 + 9 + 6 + 3 * GAP)) == ["name", "us", "grid", "kind"]
    assert list(shown(10 + 8 + 9 + 6 + 3 * GAP - 1)) == ["name", "us", "kind"]
    assert list(shown(10 + 8 + 6 + 2 * GAP - 1)) == ["name", "us"]
    assert list(shown(10 + 8 + GAP - 1)) == ["name"]


def test_one_column_takes_the_spare_width():
    assert shown(60) == {"name": 60 - 8 - 9 - 6 - 3 * GAP, "us": 8, "grid": 9, "kind": 6}


def test_columns_of_rank_0_share_a_narrow_line():
    both = (Column(name="before"), Column(name="after"))
    assert fit(both, (24, 24), 20) == (ColumnSpan(0, 9), ColumnSpan(1, 9))
    assert fit(both, (4, 24), 20) == (ColumnSpan(0, 4), ColumnSpan(1, 14))


def test_a_column_shrinks_before_others_are_left_out_and_grows_back_first():
    name = Column(name="name", most=30, narrow=10)
    columns = (name, Column(name="us", rank=1), Column(name="picture", rank=2, least=10))
    widths = {
        room: [span.width for span in fit(columns, (40, 8, 1), room)] for room in (32, 31, 60)
    }
    assert widths == {32: [10, 8, 10], 31: [21, 8], 60: [30, 8, 18]}
    assert [span.width for span in fit(columns, (4, 8, 1), 32)] == [4, 8, 16]


COLUMN = st.builds(
    Column,
    name=st.just("c"),
    rank=st.integers(0, 3),
    most=st.integers(1, 20),
    least=st.sampled_from([0, 0, 12]),
    narrow=st.sampled_from([0, 0, 4]),
)


@FUZZ
@given(st.lists(st.tuples(COLUMN, st.integers(1, 40)), min_size=1, max_size=6), st.integers(20, 90))
def test_no_line_is_wider_than_its_room(pairs, room):
    columns, wanted = zip(*pairs, strict=True)
    spans = fit(columns, wanted, room)
    assert spans
    if sum(bool(column.least) for column in columns) <= 1:
        assert sum(span.width for span in spans) + GAP * (len(spans) - 1) <= room
    shown = {span.index for span in spans}
    assert [span.index for span in spans] == sorted(shown)
    ranks = [columns[index].rank for index in shown]
    assert all(columns[index].rank >= max(ranks) for index in set(range(len(columns))) - shown)


@FUZZ
@given(st.text().map(plain), st.integers(0, 30))
def test_clipped_text_fills_its_cells_exactly(text, width):
    assert cell_len(clip(text, width)) == width
    if cell_len(text) <= width:
        assert clip(text, width).startswith(text)
    elif width:
        assert "…" in clip(text, width)


def test_wide_characters_are_counted_as_the_terminal_does():
    assert clip("日本語", 5) == "日本…"
    assert clip("日本語", 4) == "日… "


def row(*cells, room=50):
    return "".join(align_cells(cells, COLUMNS, fit(COLUMNS, WANTED, room)))


def test_numbers_are_right_aligned_and_text_left_aligned():
    assert row("a", "1.0", "8x1", "op") == f"{'a':21}  {'1.0':>8}  {'8x1':9}  op    "


def test_the_last_text_of_a_row_extends_over_empty_cells():
    assert row("a" * 40, "", "", "") == "a" * 40 + " " * 10
    assert row("a", "1.0", "x" * 15, "") == f"{'a':21}  {'1.0':>8}  {'x' * 15:17}"


def listing(**state):
    rows = (
        Row(
            key="m",
            values=("m", 1, "8x1", "module"),
            make_children=lambda: [Row(key="leaf", values=("leaf", None, None, "op"))],
        ),
    )
    page = Page(
        title="here", columns=COLUMNS, rows=rows,
        siblings=Siblings(count=3, index=1, make=lambda at: page),
    )  # fmt: skip
    return Listing(page, ViewState(**state))


def test_rows_show_their_depth_and_whether_they_are_open():
    closed, opened = listing(), listing(opened=frozenset("m"))
    assert [closed.line_cells(line)[0] for line in closed.lines] == ["▸ m"]
    assert [opened.line_cells(line)[0] for line in opened.lines] == ["▾ m", "    leaf"]


def test_a_page_without_a_tree_has_no_marks():
    flat = Listing(Page(title="", columns=COLUMNS[:1], rows=(Row(key="a", values=("a",)),)))
    assert flat.line_cells(flat.lines[0]) == ("a",)


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ({}, ("name", "us", "grid", "kind")),
        ({"sort": "us"}, ("name", "us ↓", "grid", "kind")),
        ({"sort": "us", "is_reversed": True}, ("name", "us ↑", "grid", "kind")),
        ({"sort": "name"}, ("name ↑", "us", "grid", "kind")),
        ({"sort": "kind", "is_reversed": True}, ("name", "us", "grid", "kind ↓")),
    ],
)
def test_the_heading_of_the_sorted_column_shows_the_order(state, expected):
    assert listing(**state).headings == expected


def test_the_width_of_a_column_is_that_of_its_widest_text():
    assert widest([("name", "us"), ("a", "1,000"), ("日本語", "")]) == [6, 5]


def test_the_status_names_position_order_and_filter():
    status = listing(sort="us", is_reversed=True, filter="m").status
    assert status == ("row 1/1", "tab 2/3", "sort us reversed", "filter m")
    assert listing(filter="nonsense").status[0] == "row 0/0"


@FUZZ
@given(st.lists(st.text("ab 日", min_size=1, max_size=12), max_size=8), st.integers(1, 40))
def test_facts_are_packed_whole_and_in_order(facts, width):
    lines = pack(facts, width).splitlines()
    assert [fact for line in lines for fact in line.split(" · ")] == facts
    assert all(cell_len(line) <= width or " · " not in line for line in lines)


def test_a_folded_note_that_is_too_long_ends_in_an_ellipsis():
    assert fold("one two three", 5, 3).splitlines() == ["one", "two", "three"]
    assert fold("one two three", 5, 2).splitlines() == ["one", "two… "]


CRUMBS = ("engine", "TARGET_VERIFY > size 8", "timeline")


def line(width, module="model.layers.0", device="NVIDIA H200", crumbs=CRUMBS):
    return place_line(crumbs, module, device, width).plain


def test_it_has_target_mode_size_page_module_and_device():
    assert (
        line(80)
        == f"{'engine > TARGET_VERIFY > size 8 > timeline > model.layers.0':67}  NVIDIA H200"
    )
    assert len(line(80)) == 80


def test_what_does_not_fit_is_left_out_the_page_last():
    assert line(67) == "engine > TARGET_VERIFY > size 8 > timeline > model.la…  NVIDIA H200"
    assert line(60) == f"{'engine > TARGET_VERIFY > size 8 > timeline':49}NVIDIA H200"
    assert line(52).rstrip() == "engine > TARGET_VERIFY > size 8 > timeline > model.…"
    assert line(40).rstrip() == "… > TARGET_VERIFY > size 8 > timeline"
    assert line(14).rstrip() == "… > timeline"
    assert line(10).rstrip() == "… > timel…"


def test_a_row_of_no_module_adds_nothing():
    assert line(80, module="", device="").rstrip() == "engine > TARGET_VERIFY > size 8 > timeline"


def test_the_page_is_bold_and_the_path_around_it_is_not():
    spans = place_line(CRUMBS, "m", "", 80).spans
    (bold,) = (span for span in spans if "bold" in str(span.style))
    assert line(80)[bold.start : bold.end] == "timeline"


def nodes(*modules):
    return [
        Node(index=at, kind="kernel", name="k", short_name="k", module=module)
        for at, module in enumerate(modules)
    ]


def test_nodes_share_the_module_that_contains_them_all():
    assert common_module(nodes("m.layers.0.mlp", "m.layers.0.mlp.up", "")) == "m.layers.0.mlp"
    assert common_module(nodes("m.layers.1.mlp", "m.layers.10.mlp")) == "m.layers"
    assert common_module(nodes("a", "b")) == ""
    assert common_module([]) == ""
