"""State of a page after each method of its listing, without a terminal."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from graphkit.views.pages.page_model import Column, Page, Row
from graphkit.views.tui.listing import Listing, ViewState, matcher

COLUMNS = (
    Column(name="name", least=10),
    Column(name="us", show="{:.1f}".format, is_number=True),
    Column(name="kind"),
)


def leaf(name, us=None, kind="kernel", note=""):
    return Row(key=name, values=(name, us, kind), note=note)


def module(name, *inside, us=None):
    return Row(key=name, values=(name, us, "module"), make_children=lambda: inside)


def page(**facts):
    rows = (
        leaf("refresh", 6.0, note="refresh.py"),
        module(
            "model",
            module("attention", leaf("gemm_q", 4.0), leaf("softmax", 9.0), us=13.0),
            module("mlp", leaf("gemm_up", 5.0), leaf("copy", None, "memcpy"), us=5.0),
            us=18.0,
        ),
        leaf("done", 0.0, "memset"),
    )
    return Page(title="graph", columns=COLUMNS, rows=rows, **facts)


@pytest.fixture
def listing():
    return Listing(page())


def names(listing):
    return [line.row.key for line in listing.lines]


def select(listing, name):
    listing.go(names(listing).index(name))


OUTER = ["refresh", "model", "done"]
ALL = ["refresh", "model", "attention", "gemm_q", "softmax", "mlp", "gemm_up", "copy", "done"]


def test_rows_are_closed_unless_the_page_opens_them(listing):
    assert names(listing) == OUTER
    assert names(Listing(page(opened=frozenset({"model"})))) == [
        "refresh", "model", "attention", "mlp", "done",
    ]  # fmt: skip


def test_the_rows_inside_a_closed_row_are_not_made():
    made = []
    row = Row(key="a", values=("a", None, ""), make_children=lambda: made.append("a") or ())
    listing = Listing(Page(title="", columns=COLUMNS, rows=(row,)))
    assert made == []
    listing.open()
    assert made == ["a"]


def test_open_and_close_follow_the_selected_row(listing):
    select(listing, "model")
    listing.open()
    assert names(listing) == ["refresh", "model", "attention", "mlp", "done"]
    select(listing, "mlp")
    listing.close()
    assert listing.row.key == "model", "closing a closed row selects its parent"
    listing.close()
    assert names(listing) == OUTER
    listing.close()
    assert (names(listing), listing.row.key) == (OUTER, "model")


def test_opening_a_row_opens_a_single_child_too():
    inner = module("c", leaf("d"), leaf("e"))
    listing = Listing(Page(title="", columns=COLUMNS, rows=(module("a", module("b", inner)),)))
    listing.open()
    assert names(listing) == ["a", "b", "c", "d", "e"]


def test_all_open_and_all_closed(listing):
    listing.open_all()
    assert names(listing) == ALL
    select(listing, "copy")
    listing.close_all()
    assert names(listing) == OUTER
    assert listing.row.key == "model", "the cursor goes to the parent"


def test_rows_are_sorted_within_their_parent_and_missing_values_stay_last(listing):
    listing.open_all()
    listing.sort_by("us")
    assert names(listing) == [
        "model", "attention", "softmax", "gemm_q", "mlp", "gemm_up", "copy", "refresh", "done",
    ]  # fmt: skip
    listing.reverse()
    assert names(listing) == [
        "done", "refresh", "model", "mlp", "gemm_up", "copy", "attention", "gemm_q", "softmax",
    ]  # fmt: skip


def test_text_is_sorted_from_a_to_z(listing):
    listing.sort_by("name")
    assert names(listing) == ["done", "model", "refresh"]
    listing.reverse()
    assert names(listing) == ["refresh", "model", "done"]


def test_numbers_within_names_are_sorted_as_numbers():
    rows = tuple(leaf(f"layers.{index}.mlp", 1.0) for index in (10, 2, 1))
    listing = Listing(Page(title="graph", columns=COLUMNS, rows=rows))
    listing.sort_by("name")
    assert names(listing) == ["layers.1.mlp", "layers.2.mlp", "layers.10.mlp"]


def test_sort_cycles_through_the_columns_and_the_own_order(listing):
    seen = []
    for _ in range(5):
        listing.sort_next()
        seen.append(listing.state.sort)
    assert seen == ["name", "us", "kind", "", "name"]


def test_the_own_order_can_be_reversed(listing):
    listing.reverse()
    assert names(listing) == ["done", "model", "refresh"]


def test_the_cursor_stays_on_its_row_when_the_order_changes(listing):
    listing.open_all()
    select(listing, "gemm_up")
    for _ in range(4):
        listing.sort_next()
        assert listing.row.key == "gemm_up"


def test_a_filter_keeps_rows_and_their_parents_and_opens_those(listing):
    listing.filter("gemm")
    assert names(listing) == ["model", "attention", "gemm_q", "mlp", "gemm_up"]
    listing.filter("kind:memcpy")
    assert names(listing) == ["model", "mlp", "copy"]
    listing.filter("")
    assert set(names(listing)) > set(OUTER)


def test_a_filter_without_rows_keeps_the_cursor(listing):
    select(listing, "done")
    listing.filter("nonsense")
    assert listing.row is None
    listing.filter("")
    assert listing.row.key == "done"


def test_a_filter_without_rows_says_so(listing):
    listing.filter("nonsense")
    assert (names(listing), listing.row) == ([], None)
    assert listing.empty == "no row contains 'nonsense'"
    listing.open()
    listing.close()
    listing.go(3)
    listing.filter(" ")
    assert names(listing)[0] == "refresh"


def test_a_state_applies_to_a_page_of_the_same_kind(listing):
    listing.open_all()
    listing.sort_by("us")
    select(listing, "softmax")
    other = Listing(page(), listing.state)
    assert (names(other), other.row.key) == (names(listing), "softmax")
    assert Listing(page(), ViewState(sort="of another page", cursor="gone")).row.key == "refresh"


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("", None),
        ("GEMM", True),
        ("gemm 4.0", True),
        ("gemm 5.0", False),
        ("kind:ker", True),
        ("kind:gemm", False),
        ("us:4", True),
        ("node:gemm", True),
        ("node:native", False),
        ("other:gemm", False),
        ("at::native", True),
        ("kind:", False),
    ],
)
def test_matcher(words, found):
    match = matcher(words, ["module and node", "replay us", "kind"])
    holds = match and match(("gemm_q", "4.0", "kernel"), "void at::native::gemm()")
    assert holds == found


VERBS = st.one_of(
    st.sampled_from(["open", "close", "open_all", "close_all", "sort_next", "reverse"]).map(
        lambda name: (name,)
    ),
    st.integers(-3, 12).map(lambda at: ("go", at)),
    st.sampled_from(["gemm", "kind:m", "", "nonsense"]).map(lambda words: ("filter", words)),
)


@settings(deadline=None, derandomize=True, max_examples=80)
@given(st.lists(VERBS, max_size=12))
def test_any_sequence_of_verbs_keeps_a_selection_and_all_rows(verbs):
    listing = Listing(page())
    for name, *arguments in verbs:
        before = listing.row
        getattr(listing, name)(*arguments)
        shown = names(listing)
        assert len(shown) == len(set(shown))
        assert (listing.row is None) == (not shown)
        if shown:
            assert listing.state.cursor == shown[listing.at]
        if name in ("sort_next", "reverse", "open_all") and before:
            assert listing.row is before
        if name == "filter" and before and before.key in shown:
            assert listing.row is before
    listing.filter("")
    listing.open_all()
    assert sorted(names(listing)) == sorted(ALL)
