"""Zoom and pan of the timeline, its pictures, and the modules above it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from graphkit.records import Node
from graphkit.views.pages import GraphGroup, timeline_page
from graphkit.views.tui.icicle_strip import _chosen, followed, zoomed
from graphkit.views.tui.listing import Listing

TIMES = {
    "(refresh)": (0.0, 10.0), "m.0.attn": (20.0, 30.0), "m.0.mlp": (55.0, 25.0),
    "m.1.attn": (80.0, 20.0),
}  # fmt: skip
"""Start and duration of the node of each module: a gap of 10, one of 5, and none."""


@pytest.fixture
def graph(capture):
    nodes = tuple(
        Node(
            index=at, kind="kernel", name="k", short_name=f"k{at}", module=module, start_us=start,
            duration_us=us,
        )
        for at, (module, (start, us)) in enumerate(TIMES.items())
    )  # fmt: skip
    return replace(capture.graphs[0], nodes=nodes, edges=(), timing=None)


@pytest.fixture
def listing(graph):
    return Listing(timeline_page(GraphGroup((("g", graph),)), 0))


def pictures(listing, width=20):
    (index,) = (at for at, column in enumerate(listing.page.columns) if column.draw)
    draw = listing.page.columns[index].draw
    return [draw(line.row.values[index], width) for line in listing.lines]


def window(listing):
    return listing.page.window.begin, listing.page.window.end


def test_nodes_are_drawn_where_they_ran_after_the_gap_before_them(listing):
    assert pictures(listing) == [
        "██",
        "  ░░██████",
        "          ░█████",
        "                ████",
    ]


def test_zooming_keeps_the_selected_node_in_the_middle_and_marks_nodes_outside(listing):
    listing.go(2)
    near = zoomed(zoomed(listing, "open_all"), "open_all")
    assert window(near) == (42.5, 67.5)
    assert near.row.key == "#2"
    assert pictures(near) == [
        "<",
        "██████",
        "      ░░░░██████████",
        " " * 19 + ">",
    ]
    (time,) = (column for column in near.page.columns if column.name == "time")
    assert time.axis == ("42.50", "67.50 us")


def test_zooming_out_and_panning_stop_at_the_ends_of_the_replay(listing):
    assert window(zoomed(listing, "close_all")) == (0.0, 100.0)
    near = zoomed(listing, "open_all")
    assert window(near) == (0.0, 50.0), "the first node cannot be in the middle"
    assert window(zoomed(near, "close")) == (0.0, 50.0)
    right = near
    for expected in (12.5, 25.0, 37.5, 50.0, 50.0):
        right = zoomed(right, "open")
        assert window(right) == (expected, expected + 50.0)
    assert window(zoomed(right, "close")) == (37.5, 87.5)


def test_zooming_in_stops_at_a_microsecond(listing):
    for _ in range(20):
        listing = zoomed(listing, "open_all")
    assert window(listing) == (0.0, 1.0)


def test_selecting_a_node_outside_of_the_window_moves_it(listing):
    near = zoomed(listing, "open_all")
    assert followed(near) is None
    near.go(3)
    assert window(followed(near)) == (50.0, 100.0)
    assert followed(near).row.key == "#3"


def test_zooming_keeps_order_filter_and_search(listing):
    listing.sort_by("us")
    listing.filter("attn")
    near = zoomed(listing, "open_all")
    assert near.state == listing.state
    assert [line.row.key for line in near.lines] == ["#1", "#3"]


def test_other_pages_do_not_zoom(capture):
    from graphkit.views.pages import initial_pages

    listing = Listing(initial_pages(capture)[0])
    assert (zoomed(listing, "open_all"), followed(listing)) == (None, None)
    assert (
        zoomed(
            Listing(timeline_page(GraphGroup((("g", replace(capture.graphs[0], nodes=())),)), 0)),
            "open",
        )
        is None
    )


def test_nodes_that_run_side_by_side_have_a_branch_and_another_shade(graph):
    beside = replace(graph.nodes[1], index=4, start_us=22.0, duration_us=20.0)
    page = timeline_page(GraphGroup((("g", replace(graph, nodes=(*graph.nodes, beside))),)), 0)
    listing = Listing(page)
    names = [column.name for column in page.columns]
    branches = [line.row.values[names.index("branch")] for line in listing.lines]
    assert branches == [1, 1, 2, 1, 1]
    assert pictures(listing)[2].strip() == "▓" * 5
    assert ("branches", "2, side by side") in page.facts


def test_without_branches_there_is_no_column_for_them(listing):
    assert "branch" not in [column.name for column in listing.page.columns]
    assert ("longest gap", "10.00 us before #1") in listing.page.facts


def names(levels):
    return [[box.name for box in level.boxes] for level in levels]


def test_levels_that_one_box_fills_are_left_out_first(graph, listing):
    shown = listing.page.window
    assert names(_chosen(shown, 9)) == [["(refresh)", "m"], ["0", "1"], ["attn", "mlp", "attn"]]
    assert names(_chosen(shown, 2)) == [["(refresh)", "m"], ["0", "1"]]
    inside = shown.make(20.0, 70.0).window
    assert names(_chosen(inside, 1)) == [["attn", "mlp", "attn"]]
    assert _chosen(shown, 0) == []


def test_keys_zoom_pan_and_go_back_to_the_whole_replay(graph, drive):
    async def script(on):
        await on.press("t", "down", "down", "+")
        near = on.lines
        await on.press("right")
        panned = window(on.listing)
        await on.press("-", "-")
        return near, panned, window(on.listing), on.status

    near, panned, whole, status = drive(graph, script, (100, 24))
    assert any(line.startswith("▏0 ─") for line in near)
    assert any(line.startswith("▏attn") and "▏mlp" in line for line in near)
    assert any("30.00  " in line and " 80.00 us" in line for line in near), "the axis"
    assert panned == (42.5, 92.5)
    assert whole == (0.0, 100.0)
    assert "0.00 to 100.00 us, 1x: + - zoom, left right pan" in status


def test_moving_to_a_node_outside_of_the_window_shows_it(graph, drive):
    async def script(on):
        await on.press("t", "+", "end")
        return window(on.listing), on.selected, [line for line in on.lines if line[:1] == ">"]

    shown, selected, (marked,) = drive(graph, script, (100, 24))
    assert (shown, selected) == ((50.0, 100.0), "k3")
    assert "█" in marked

    async def search(on):
        await on.press("t", "+", "/")
        await on.answer("k3")
        return window(on.listing), on.selected

    assert drive(graph, search, (100, 24)) == ((50.0, 100.0), "k3")


def test_the_modules_of_the_selected_node_are_underlined(graph, drive):
    async def script(on):
        await on.press("t", "down")
        strip = on.app.screen.query_one("IcicleStrip")
        lines = [strip.render_line(y) for y in range(strip.size.height)]
        return [
            segment.text.strip("▏─ ")
            for line in lines
            for segment in line
            if segment.style and segment.style.underline
        ]

    assert drive(graph, script, (100, 24)) == ["m", "0", "attn"]


def test_a_page_without_a_window_has_no_modules_above_it(graph, drive):
    async def script(on):
        await on.press("t", "escape")
        return on.app.screen.query_one("IcicleStrip").display

    assert drive(graph, script) is False


def test_a_click_on_a_module_selects_its_first_node(graph, drive):
    """The window is 100 us in 100 cells: layer 1 runs from cell 80 on, the mlp of layer 0 at 55."""

    async def script(on):
        async def click(x, y):
            await on.pilot.click("IcicleStrip", offset=(x, y))
            await on.settle()
            return on.selected

        await on.press("t")
        found = [await click(95, 1), await click(75, 2), await click(75, 1), await click(10, 2)]
        await on.press("f", "type:k0", "enter")
        return found, await click(95, 1), on.status

    found, kept, status = drive(graph, script, (100, 24))
    assert found == ["k3", "k2", "k1", "k1"], "there is no module at cell 10 of that line"
    assert kept == "k0"
    assert "no visible row runs in 1" in status


def test_the_list_follows_the_window(listing):
    near = zoomed(zoomed(listing, "open_all"), "open_all")
    assert (window(near), near.row.key) == ((0.0, 25.0), "#0")
    right = []
    for _ in range(12):
        near = zoomed(near, "open")
        right.append(near.row.key)
    assert right == ["#0", *["#1"] * 6, *["#2"] * 5], "a node that runs in the window stays"
    assert window(near) == (75.0, 100.0)
    near.go(3)
    left = []
    for _ in range(12):
        near = zoomed(near, "close")
        left.append(near.row.key)
    assert left == [*["#3"] * 3, *["#2"] * 4, *["#1"] * 5]


def test_panning_scrolls_the_list_to_the_window(h200, drive):
    async def script(driver):
        await driver.press("t", "+", "+", "right")
        rows = driver.lines[driver.app.screen.query_one("RowList").region.y + 1 :]
        return driver.selected, rows[0], driver.listing.page.window

    selected, first, window = drive(h200, script, mode="TARGET_VERIFY", batch_size=1)
    assert selected != "fetch_kernel"
    assert first.startswith(f"> {selected[:20]}"), "the first row is the first node in the window"
    assert window.begin > 0


@pytest.mark.slow
@pytest.mark.parametrize("key", ["K", "t", "m", "c", "b"])
@pytest.mark.parametrize("page", ["K", "t", "m", "c"])
def test_every_page_of_a_graph_leads_to_the_others_of_that_graph(capture, drive, page, key):
    names = {"K": "kernels", "t": "timeline", "m": "memory", "c": "from", "b": "buffers"}

    async def script(driver):
        await driver.keys(page, "tab", key)
        return driver.app.screen.path[-1], driver.status

    found, status = drive(capture, script, mode="TARGET_VERIFY", batch_size=1)
    assert found.startswith(names[key])
    if page == key:
        assert "this page shows" in status or "tab compares" in status
    elif page != "c" and key in "Ktm":
        assert found.endswith("TARGET_VERIFY 4"), "tab went on to the next size"
