"""The functions of the page's script that need no page, run by Node.js where it is installed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess

import pytest

from graphkit.views.html import html_text
from graphkit.views.selection import named_graphs

FRAMES = [
    {"parent": None, "left": 0, "width": 100}, {"parent": 0, "left": 0, "width": 40},
    {"parent": 1, "left": 0, "width": 30}, {"parent": 0, "left": 40, "width": 60},
    {"parent": 3, "left": 50, "width": 0.01},
]  # fmt: skip
DOCUMENT = """
const texts = { drawing: '{"texts": [], "graphs": []}', later: "" };
const document = { getElementById: (id) => ({ textContent: texts[id] }) };
"""
"""The parts of a page that the script reads before it starts."""
CALLS = f"""
later.catch(() => null);
const frames = {json.dumps(FRAMES)};
const places = (root) => placed(frames, root).map(({{ at, depth, left, width }}) =>
  [at, depth, left, width]);
const shown = placed(frames, 0);
const leads = (at, key) => (neighbour(shown, frames, at, key) || {{ at: null }}).at;
const outer = {{ us: 5 }};
console.log(JSON.stringify({{
  ticks: [ticks(0, 100, 5), ticks(0.31, 0.62, 3), ticks(0, 0, 4)],
  scroll: [zoomedScroll(0, 100, 2), zoomedScroll(100, 100, 0.5), zoomedScroll(30, 0, 1)],
  labels: [label("gemm", 60), label("elementwise_kernel", 60), label("elementwise_kernel", 20)],
  whole: places(0), inside: places(1), path: pathTo(frames, 2),
  tickTexts: [tickText(90, "6,000", 0, 200), tickText(180, "6,000", 0, 200),
    tickText(20, "6,000", 0, 30)],
  leads: [leads(0, "ArrowDown"), leads(1, "ArrowDown"), leads(2, "ArrowUp"),
    leads(1, "ArrowRight"), leads(3, "ArrowLeft"), leads(3, "ArrowRight"), leads(0, "ArrowUp")],
  times: [totalTime([outer, {{ us: 3, holder: outer }}]), totalTime([{{ us: 3, holder: outer }}]),
    totalTime([{{ us: null }}])],
  texts: [us(null), us(1234.5)],
}}));
"""


@pytest.fixture(scope="module")
def found(capture):
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs Node.js")
    page = html_text(capture, named_graphs(capture))
    script = re.search(r"<script>\n(.*)</script>", page, re.DOTALL)[1]
    definitions, start, _ = script.rpartition("\nstart();")
    assert start, "the last statement starts the page"
    definitions = DOCUMENT + definitions
    done = subprocess.run(
        [node, "-"], input=definitions + CALLS, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_ticks_are_round_times_within_the_view(found):
    whole, part, none = found["ticks"]
    assert whole == [0, 20, 40, 60, 80, 100]
    assert part == pytest.approx([0.4, 0.6])
    assert none == []


def test_a_point_keeps_its_time_when_the_view_zooms(found):
    assert found["scroll"] == [100, 0, 30]


def test_a_name_is_cut_to_its_bar(found):
    assert found["labels"] == ["gemm", "element…", ""]


def test_a_frame_fills_the_view_when_it_is_zoomed_into(found):
    assert found["whole"] == [[0, 0, 0, 1], [1, 1, 0, 0.4], [2, 2, 0, 0.3], [3, 1, 0.4, 0.6]]
    assert found["inside"] == [[0, 0, 0, 1], [1, 1, 0, 1], [2, 2, 0, 0.75]]
    assert found["path"] == [0, 1, 2]


def test_arrows_lead_to_the_frames_around_inside_and_beside(found):
    assert found["leads"] == [1, 2, 1, 3, 1, None, None]


def test_a_node_inside_of_another_one_counts_once(found):
    assert found["times"] == [5, 3, None]
    assert found["texts"] == ["-", "1,234.50"]


def test_no_time_of_the_axis_is_cut(found):
    assert found["tickTexts"] == [
        {"x": 93, "text-anchor": "start"}, {"x": 177, "text-anchor": "end"}, None,
    ]  # fmt: skip
