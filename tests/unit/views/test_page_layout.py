"""The page as Chromium lays it out at three widths, where a Chromium is installed."""

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

pytestmark = pytest.mark.slow

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
  loading: document.getElementById("loading") !== null,
  shown: document.body.innerText,
  overflow: document.documentElement.scrollWidth - window.innerWidth,
  gaps: all(".tree .row").map((row) => textBegin(row.children[2]) - box(row.children[1]).right),
  cut: all("td button").filter((each) => each.scrollWidth > each.clientWidth + 1).length,
  broken: all("#kernels td").flatMap(words),
  ticks: all("#labels text:not(.name)").map((each) => [each.textContent,
    box(each).left - view.left, view.right - box(each).right]),
};
document.body.dataset.found = JSON.stringify(found);
"""
NEVER_UNPACKED = "Response.prototype.text = () => new Promise(() => {});"


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
            capture_output=True, text=True, check=False, timeout=120,
        )  # fmt: skip
        found = re.search(r'<body[^>]* data-found="([^"]*)"', done.stdout)
        assert found, done.stderr[-2000:]
        return json.loads(html.unescape(found[1]))

    return run


@pytest.mark.parametrize("width", [500, 1000, 1600])
def test_nothing_is_cut_broken_or_far_apart(lay_out, width):
    found = lay_out(width)
    assert not found["hidden"]
    assert not found["loading"]
    assert found["overflow"] <= 0
    assert len(found["gaps"]) > 5
    assert max(found["gaps"]) < 60, "px from a bar to the name of its module"
    assert found["cut"] == 0, "kernels of one beginning have other ends"
    assert found["broken"] == []
    assert len(found["ticks"]) > 2
    assert all(min(left, right) >= 0 for _, left, right in found["ticks"])


def test_the_page_says_what_is_known_while_the_record_is_unpacked(lay_out):
    found = lay_out(1000, NEVER_UNPACKED)
    assert found["hidden"]
    for text in ("Unpacking the record", "profiled", "6,131.07 us", "captured sizes: 1"):
        assert text in found["shown"]


def test_a_page_without_its_record_shows_the_plain_table(lay_out):
    broken = 'Response.prototype.text = () => Promise.reject(new Error("cut"));'
    found = lay_out(1000, broken)
    assert "The record cannot be unpacked: cut." in found["shown"]
    assert "Unpacking the record" not in found["shown"]
    assert "paged_attention_kernel" in found["shown"]
