"""Golden text of the screen at several sizes, and its reaction to keys and the mouse."""

from __future__ import annotations

import asyncio
import io
import re
import runpy
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from rich.console import Console

from graphkit.views import inspect_view
from graphkit.views.text.page import clip

SIZES = ((60, 24), (80, 24), (120, 40))

WALK = {
    "overview": (),
    "graph": ("down", "down", "down", "enter"),
    "graph-open": ("+", "down", "down", "down"),
    "node": ("/", "type:splitK", "enter", "end", "enter"),
    "node-next": ("tab",),
    "graph-sorted": ("escape", "s", "s", "s", "home"),
    "graph-filtered": ("/", "ctrl+u", "type:kind:kernel o_proj", "enter"),
    "compare": ("c",),
    "compare-open": ("+", "end"),
    "kernels": ("escape", "K", "right"),
    "timeline": ("escape", "t", "end"),
    "memory": ("escape", "m", "end", "right"),
    "buffers": ("escape", "b", "end"),
    "prompt": ("/", "type:bfloat16"),
    "nothing": ("ctrl+u", "type:no such thing", "enter"),
    "help": ("?",),
}

"""Pages in the order of one walk, each with the keys that lead to it."""

COMPILED = {
    "compiled": ("down", "down"),
    "compiled-empty": ("enter",),
    "compiled-graph": ("tab",),
    "compiled-node": ("enter", "end"),
    "compiled-compare": ("escape", "c", "tab", "down"),
    "compiled-memory": ("escape", "m", "+", "end"),
}

"""A walk through the record of a compiled program."""


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES, ids="{0[0]}x{0[1]}".format)
def test_every_page_matches_its_golden_text(capture, drive, golden, size):
    check_walk(drive, capture, WALK, size, golden)


@pytest.mark.parametrize("size", [(40, 12), (80, 24)], ids="{0[0]}x{0[1]}".format)
def test_every_page_of_a_compiled_program_matches_its_golden_text(compiled, drive, golden, size):
    check_walk(drive, compiled, COMPILED, size, golden)


def check_walk(drive, record, walk, size, golden):
    async def script(on):
        shown = {}
        for name, keys in walk.items():
            await on.press(*keys)
            shown[name] = on.text
        return shown

    for name, text in drive(record, script, size).items():
        golden(f"{name}-{size[0]}x{size[1]}", text)
        assert max(map(len, text.splitlines())) <= size[0]
        assert len(text.splitlines()) == size[1]


def test_a_recording_matches_its_golden_text(recording, drive, golden):
    async def script(on):
        for width, height in SIZES:
            await on.resize(width, height)
            golden(f"recording-{width}x{height}", on.text)

    drive(recording, script)


def test_a_terminal_that_is_too_small_says_so_and_recovers(capture, drive):
    async def script(on):
        await on.press("down", "down")
        for size in ((39, 24), (80, 11), (10, 3), (1, 1)):
            await on.resize(*size)
            small = " ".join(on.lines)
            assert "too small: {} x {}".format(*size)[: size[0] // 3] in small
            assert "TARGET_VERIFY" not in small
            await on.resize(80, 24)
            assert on.selected == "size 4"
            assert ">     size 4" in on.text

    drive(capture, script)


def test_resizing_keeps_the_selected_row_in_sight(capture, drive):
    async def script(on):
        await on.press("down", "down", "down", "enter", "+", "end", "up")
        before = on.selected
        for size in ((60, 24), (200, 60), (80, 13)):
            await on.resize(*size)
            assert on.selected == before
            marked = [line for line in on.lines if line.startswith(">")]
            assert [before[:20] in line for line in marked] == [True]

    drive(capture, script)


def test_a_wider_terminal_shows_more_columns(capture, drive):
    async def script(on):
        heads = []
        for width in (44, 60, 80, 120, 60):
            await on.resize(width, 24)
            heads.append(on.head.split("mode and size")[1].split())
        return heads

    narrow, small, middle, wide, again = drive(capture, script)
    assert set(narrow) < set(small) < set(middle) < set(wide)
    assert wide == [
        "nodes",
        "pool",
        "capture",
        "ms",
        "replay",
        "us",
        "eager",
        "us",
        "replays",
        "padded",
        "rows",
        "fallbacks",
    ]
    assert again == small


def test_a_single_graph_is_the_first_page(capture, drive):
    async def script(on):
        await on.press("escape")
        return on.listing.page.title, on.status

    title, status = drive(capture.graphs[2], script)
    assert (title, status) == ("TARGET_VERIFY 8", "this is the first page; q leaves")


@pytest.mark.parametrize(
    ("which", "titles"),
    [
        ({}, ["tiny"]),
        ({"mode": "draft_extend_v2"}, ["tiny", "DRAFT_EXTEND_V2 1"]),
        ({"batch_size": 4}, ["tiny", "TARGET_VERIFY 4"]),
        ({"mode": "DRAFT_EXTEND_V2", "batch_size": 8}, ["tiny", "DRAFT_EXTEND_V2 8"]),
    ],
)
def test_it_opens_with_the_selected_graph(capture, drive, which, titles):
    async def script(on):
        return list(on.app.screen.path)

    assert drive(capture, script, **which) == titles


def test_a_record_without_graphs_says_so(capture, drive):
    async def script(on):
        await on.press("down", "enter")
        return on.status

    said = drive(replace(capture, graphs=()), script)
    assert said.startswith("the record holds no nodes")


def test_tab_keeps_the_state_on_the_next_size(capture, drive):
    async def script(on):
        await on.press("down", "enter", "+", "s", "s", "/")
        await on.answer("o_proj")
        before = on.listing
        await on.press("tab")
        return before, on.listing

    before, after = drive(capture, script)
    assert (before.page.title, after.page.title) == ("TARGET_VERIFY 1", "TARGET_VERIFY 4")
    assert before.state == after.state
    assert after.state.sort == "nodes"


def test_tab_opens_rows_that_only_the_next_page_has(capture, drive):
    async def script(on):
        await on.press("down", "enter", "down", "enter")
        before = [line.row.key for line in on.listing.lines]
        await on.press("tab")
        return before, [line.row.key for line in on.listing.lines]

    before, after = drive(capture, script)
    assert "arguments" not in before
    assert "argument 0" in after


def test_the_selected_row_is_marked_and_reversed_and_no_other(capture, drive):
    async def script(on):
        await on.press("down", "down")
        sheet = on.app.screen.query_one("RowList")
        return [sheet.render_line(y) for y in range(1, 9)]

    strips = drive(capture, script)
    assert [strip.text.startswith("> ") for strip in strips].index(True) == 2
    for place, strip in enumerate(strips):
        styles = [segment.style for segment in strip if segment.style is not None]
        assert {bool(style.reverse) for style in styles} == {place == 2}


def test_tab_cycles_through_all_sizes(capture, drive):
    async def script(on):
        await on.press("down", "enter")
        titles = []
        for _ in range(4):
            titles.append(on.listing.page.title)
            await on.press("tab")
        return titles

    assert [title.split()[1] for title in drive(capture, script)] == ["1", "4", "8", "1"]


def test_edges_lead_from_node_to_node_and_escape_leads_back(capture, drive):
    async def script(on):
        await on.press(*("down", "enter", "down", "down", "enter"), "end", "enter", "end", "enter")
        there = on.app.screen.path
        await on.press("escape", "escape", "escape")
        return there, on.app.screen.path

    there, back = drive(capture, script)
    assert [title.split()[0] for title in there[2:]] == ["#2", "#3", "#4"]
    assert back == ("tiny", "TARGET_VERIFY 1")


def test_a_click_selects_a_second_one_opens_and_a_head_sorts(capture, drive):
    async def script(on):
        await on.pilot.click("RowList", offset=(8, 2))
        selected = on.selected
        await on.click_head("nodes")
        sort = on.listing.state.sort
        await on.pilot.click("RowList", offset=(8, 3), times=2)
        await on.pilot.pause()
        return selected, sort, on.listing.page.title

    assert drive(capture, script) == ("size 1", "nodes", "TARGET_VERIFY 1")


def test_a_click_below_the_rows_does_nothing_and_a_second_one_on_a_head_reverses(capture, drive):
    async def script(on):
        await on.press("down")
        await on.pilot.click("RowList", offset=(8, 14), times=2)
        await on.settle()
        assert (on.selected, on.listing.page.title) == ("size 1", "tiny")
        for _ in range(2):
            await on.click_head("nodes")
        assert (on.listing.state.sort, on.listing.state.is_reversed) == ("nodes", True)

    drive(capture, script)


def test_the_screen_shows_the_tables_of_the_pipe(h200, drive):
    """Overview, buffers and a graph, all rows open: headings and cells."""

    async def script(on):
        tables = []
        for keys in (("home",), ("b",), ("escape", "down", "enter")):
            await on.press(*keys)
            listing = on.listing
            is_in_run = [any(" x" in key for key in line.parents) for line in listing.all_lines]
            lines = [
                line for line, is_in in zip(listing.all_lines, is_in_run, strict=True) if not is_in
            ]
            rows = [listing.headings, *(listing.cells(line.row) for line in lines)]
            tables.append([" ".join(cells).split() for cells in rows])
        return tables

    text = io.StringIO()
    Console(file=text, width=250, _environ={}).print(inspect_view(h200))
    piped = [line.split() for line in text.getvalue().splitlines()]
    for table in drive(h200, script):
        start = piped.index(table[0])
        assert piped[start : start + len(table)] == table


LONG = ("a title that goes on, " * 8).strip()


@pytest.mark.slow
def test_clipped_text_ends_in_an_ellipsis(capture, drive):
    """Title, facts, the note of the selected row and the status."""
    node, *others = capture.graphs[0].nodes
    nodes = (replace(node, name="long_name " * 200), *others)
    environment = replace(capture.environment, device="device " * 30)
    graph = replace(capture.graphs[0], nodes=nodes, captured_at="place " * 30)
    record = replace(capture, target=LONG, environment=environment, graphs=(graph,))

    async def script(on):
        for size in ((80, 24), (60, 24), (40, 12)):
            await on.resize(*size)
            await on.restart(record)
            assert on.lines[0] == clip(LONG, size[0]).rstrip()
            assert on.lines[1].endswith("…")
            await on.press("down", "enter", "home", "/")
            await on.answer("long_name " * 60)
            region = on.app.screen.query_one("#note").region
            note = on.lines[region.y : region.bottom]
            assert len(note) == size[1] // 4
            assert note[-1].endswith("…")
            assert on.status.endswith("…")

    drive(record, script)


def test_the_smallest_terminal_shows_the_selected_row_below_a_long_note(capture, drive):
    nodes = tuple(replace(node, name="long_name " * 200) for node in capture.graphs[0].nodes)
    record = replace(capture, graphs=(replace(capture.graphs[0], nodes=nodes),))

    async def script(on):
        await on.press("down", "enter", "+", "end")
        return on.lines

    assert sum(line.startswith("> ") for line in drive(record, script, (40, 12))) == 1


def test_a_note_has_the_origin_of_a_node_before_its_long_name(h200, drive):
    graph = h200.graphs[0]
    at = max(range(len(graph.nodes)), key=lambda at: len(graph.nodes[at].name))

    async def script(on):
        await on.press("+")
        rows = [line.row.key for line in on.listing.lines]
        on.listing.go(rows.index(f"#{at}") - 1)
        await on.press("down")
        return " ".join(on.lines[-9:])

    note = drive(graph, script, (80, 24))
    node = graph.nodes[at]
    assert len(node.name) > 600
    for fact in (f"#{at} ", node.module, node.op, node.source):
        assert fact in note


def test_the_line_of_a_module_is_in_sight_in_80_columns(h200, drive):
    async def script(driver):
        await driver.press("end")
        return driver.text

    shown = drive(h200, script, mode="TARGET_VERIFY", batch_size=1)
    assert re.search(r"\w\.py:\d+ \+\d+\n", shown), "in the column"
    assert re.search(r"\w\.py:\d+ in \w+", shown), "in the note of the selected row"


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
