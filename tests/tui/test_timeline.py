"""Pictures and branches of the timeline, and the pages that it leads to."""

from __future__ import annotations

from dataclasses import replace

import pytest

from graphkit.records import Node
from graphkit.views.pages.page_model import GraphGroup
from graphkit.views.pages.timeline import timeline_page
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


def test_nodes_are_drawn_where_they_ran_after_the_gap_before_them(listing):
    assert pictures(listing) == [
        "██",
        "  ░░██████",
        "          ░█████",
        "                ████",
    ]


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
