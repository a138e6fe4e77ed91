"""The page in a browser: its layout in Chromium, and the functions of its script in Node.js."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from graphkit.records import load_record
from graphkit.views.html import html_text
from graphkit.views.selection import named_graphs

RECORD = Path(__file__).parents[2] / "data" / "h200-8b-step.json"

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)

MEASURE = """
const box = (each) => each.getBoundingClientRect();
const words = (each) => {
  const text = document.createTreeWalker(each, NodeFilter.SHOW_TEXT);
  const broken = [];
  while (text.nextNode()) {
    for (const word of text.currentNode.data.matchAll(/[A-Za-z0-9]+/g)) {
      const range = document.createRange();
      range.setStart(text.currentNode, word.index);
      range.setEnd(text.currentNode, word.index + word[0].length);
      if (range.getClientRects().length > 1) broken.push(word[0]);
    }
  }
  return broken;
};
const all = (selector) => [...document.querySelectorAll(selector)];
const textBegin = (each) => {
  const range = document.createRange();
  range.selectNodeContents(each);
  return range.getBoundingClientRect().left;
};
const view = box(document.getElementById("view"));
const found = {
  hidden: document.getElementById("page").hidden,
  bars: all("#bars rect").length,
  rows: all("#nodes tbody tr").length,
  shown: document.body.innerText,
  details: document.getElementById("details").innerText,
  overflow: document.documentElement.scrollWidth - window.innerWidth,
  gaps: all(".tree .row").map((row) => textBegin(row.children[2]) - box(row.children[1]).right),
  cut: all("td button").filter((each) => each.scrollWidth > each.clientWidth + 1).length,
  broken: all("#kernels td").flatMap(words),
  ticks: all("#labels text:not(.name)").map((each) => [each.textContent,
    box(each).left - view.left, view.right - box(each).right]),
};
document.body.dataset.found = JSON.stringify(found);
"""


@pytest.fixture(scope="module")
def page():
    record = load_record(RECORD)
    return html_text(record, named_graphs(record))


@pytest.fixture
def lay_out(page, tmp_path):
    """``lay_out(width, before)``: what ``MEASURE`` finds at a width, after a script runs first."""
    if BROWSER is None:
        pytest.skip("needs Chromium")

    def run(width, before=""):
        file = tmp_path / "page.html"
        late = f"<script>setTimeout(() => {{ {MEASURE} }}, 3000);</script></body>"
        early = f"<head><script>{before}</script>"
        file.write_text(page.replace("</body>", late).replace("<head>", early, 1), "utf-8")
        done = subprocess.run(
            [
                BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu",
                "--disable-dev-shm-usage", f"--user-data-dir={tmp_path / 'profile'}",
                "--virtual-time-budget=5000", f"--window-size={width},1200", "--dump-dom",
                file.as_uri(),
            ],
            capture_output=True, text=True, check=False, timeout=600,
        )  # fmt: skip
        found = re.search(r'<body[^>]* data-found="([^"]*)"', done.stdout)
        assert found, done.stderr[-2000:]
        return json.loads(html.unescape(found[1]))

    return run


@pytest.mark.parametrize("width", [400, 500, 900, 1600])
def test_nothing_is_cut_broken_or_far_apart(lay_out, width):
    found = lay_out(width)
    assert not found["hidden"]
    assert found["overflow"] <= 0
    assert len(found["gaps"]) > 5
    assert max(found["gaps"]) < 60, "px from a bar to the name of its module"
    assert found["cut"] == 0, "kernels of one beginning have other ends"
    assert found["broken"] == []
    assert len(found["ticks"]) >= 2
    assert all(min(left, right) >= 0 for _, left, right in found["ticks"])


def test_charts_and_tables_have_the_values_of_the_record(lay_out):
    found = lay_out(1000)
    assert not found["hidden"]
    assert (found["bars"] > 500, found["rows"]) == (True, 300)
    for text in (
        "4,818.80 us",
        "Timeline of a replay of STEP",
        "verify 3,655.35 us",
        "paged_attention_kernel",
    ):
        assert text in found["shown"]


def test_a_page_without_its_record_says_what_is_missing(lay_out):
    broken = 'Response.prototype.text = () => Promise.reject(new Error("cut"));'
    found = lay_out(1000, broken)
    assert "The page cannot be drawn: cut." in found["shown"]


def test_a_click_opens_a_node_with_its_facts_and_arguments(lay_out):
    click = """setTimeout(() => {
      document.getElementById("search").value = "paged_attention page_table";
      document.getElementById("search").dispatchEvent(new Event("input"));
      document.querySelector("#nodes td button").click();
    }, 2000);"""
    found = lay_out(1000, click)
    assert 0 < found["rows"] < 300, "the names of arguments are searched, too"
    assert "paged_attention_kernel" in found["details"]
    for text in ("waits for", "registers", "argument", "page_table", "0x7"):
        assert text in found["details"]


FRAMES = [
    {"parent": None, "left": 0, "width": 100}, {"parent": 0, "left": 0, "width": 40},
    {"parent": 1, "left": 0, "width": 30}, {"parent": 0, "left": 40, "width": 60},
    {"parent": 3, "left": 50, "width": 0.01},
]  # fmt: skip

DOCUMENT = """
const document = { getElementById: () => null };
"""

CALLS = f"""
const frames = {json.dumps(FRAMES)};
const places = (root) => placed(frames, root).map(({{ at, depth, left, width }}) =>
  [at, depth, left, width]);
const outer = {{ us: 5 }};
const node = (name, us, part = "mlp") => ({{ name, us, part, grid: "1" }});
const layer = (number, kernel, us) =>
  ({{ name: `${{number}}.mlp`, rows: [node(kernel, us), {{ name: "k x2", isRun: true,
    rows: [node("k", 1), node("k", 1)] }}] }});
const modules = (us, ...layers) => moduleFrames({{ title: "g", us,
  tree: [node("copy", 1, "other"), {{ name: "m.layers", rows: layers }}] }})
  .map(({{ name, parent, left, width, part, text }}) => [name, parent, left, width, part, text]);
console.log(JSON.stringify({{
  ticks: [ticks(0, 100, 5), ticks(0.31, 0.62, 3), ticks(0, 0, 4)],
  scroll: [zoomedScroll(0, 100, 2), zoomedScroll(100, 100, 0.5), zoomedScroll(30, 0, 1)],
  labels: [label("gemm", 60), label("elementwise_kernel", 60), label("elementwise_kernel", 20)],
  whole: places(0), inside: places(1), path: pathTo(frames, 2),
  tickTexts: [tickText(90, "6,000", 0, 200), tickText(180, "6,000", 0, 200),
    tickText(20, "6,000", 0, 30)],
  modules: [modules(10, layer(0, "gemm", 2), layer(1, "gemm", 3)),
    modules(10, layer(0, "first", 2), layer(1, "gemm", 3)), modules(null, layer(0, "gemm", null))],
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
    definitions, start, _ = script.rpartition("\nstart()")
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


def test_a_node_inside_of_another_one_counts_once(found):
    assert found["times"] == [5, 3, None]
    assert found["texts"] == ["-", "1,234.50"]


def test_no_time_of_the_axis_is_cut(found):
    assert found["tickTexts"] == [
        {"x": 93, "text-anchor": "start"}, {"x": 177, "text-anchor": "end"}, None,
    ]  # fmt: skip


def test_equal_layers_share_a_frame_that_has_the_time_of_all(found):
    equal, other, unmeasured = found["modules"]
    assert [frame[:5] for frame in equal] == [
        ["g", None, 0, 1, ""],
        ["m.layers", 0, 0, 0.9, "mlp"],
        ["*.mlp (2 x)", 1, 0, 0.9, "mlp"],
    ]
    assert equal[2][5] == "m.layers.*.mlp: 9.00 us, 90.0%, 6 nodes"
    assert [frame[:4] for frame in other[2:]] == [["0.mlp", 1, 0, 0.4], ["1.mlp", 1, 0.4, 0.5]]
    assert unmeasured[0][5] == "g: 3.00 us, 4 nodes"
    assert [frame[3] for frame in unmeasured] == [1, 0.75, 0.75], "numbers of nodes"
