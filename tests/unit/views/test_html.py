"""HTML that loads nothing, embeds the record, and is readable without JavaScript."""

from __future__ import annotations

import base64
import dataclasses
import gzip
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from graphkit.records import CaptureRecord, GraphRecord, load_record
from graphkit.views.frames import Frame, frames_of
from graphkit.views.html import html_of
from graphkit.views.pages import kernels_page
from graphkit.views.parts import PARTS, parts_of
from graphkit.views.phases import phases_of
from graphkit.views.replay import branches_of
from graphkit.views.selection import named_graphs, select_graphs

DATA = Path(__file__).parents[2] / "data"
VOID = {"meta", "link", "input", "br"}


class Page(HTMLParser):
    """What a browser makes of the text, as far as needed here."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.texts, self.links = [], [], {}, []
        self.feed(text)
        self.close()
        assert self.open == [], "every tag is closed"

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.links += [value for name, value in attrs if name in ("src", "href", "action")]
        if tag not in VOID:
            self.open.append((tag, dict(attrs).get("id", tag)))

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        for _, name in self.open:
            self.texts[name] = self.texts.get(name, "") + data


def unpacked(parsed, name):
    """The text of a script that the page decompresses."""
    return gzip.decompress(base64.b64decode(parsed.texts[name])).decode("utf-8", "surrogatepass")


@pytest.fixture(scope="module")
def page(capture):
    return html_of(capture, named_graphs(capture))


def test_it_loads_nothing(page):
    parsed = Page(page)
    assert set(parsed.links) == {"data:,"}
    text = re.sub(r'data-encoding="gzip base64">[^<]*<', "", page)
    assert not re.search(r"https?://|//[a-z]|url\(|@import|fetch\(|XMLHttp|import\(", text)
    (policy,) = (a["content"] for t, a in parsed.tags if a.get("http-equiv"))
    assert policy.startswith("default-src 'none'")


def test_the_record_in_it_is_the_record(page, capture):
    parsed = Page(page)
    assert CaptureRecord.from_json(unpacked(parsed, "record")) == capture
    assert parsed.texts["title"] == parsed.texts["h1"] == "graphkit capture: tiny"


def test_a_selection_holds_its_graphs_alone(capture):
    page = html_of(capture, select_graphs(capture, mode="DRAFT", batch_size=4))
    record = CaptureRecord.from_json(unpacked(Page(page), "record"))
    assert record == dataclasses.replace(capture, graphs=capture.graphs[2:3])


def test_it_opens_with_the_first_graph_that_has_nodes(compiled, capture):
    empty = dataclasses.replace(compiled, graphs=compiled.graphs[:1])
    for record, first in ((compiled, "1"), (capture, "0"), (empty, "0")):
        tags = Page(html_of(record, named_graphs(record))).tags
        assert [facts["data-first"] for tag, facts in tags if tag == "select"] == [first]


def test_a_graph_alone_is_its_own_record(graph):
    page = html_of(graph, named_graphs(graph))
    assert GraphRecord.from_json(unpacked(Page(page), "record")) == graph


@pytest.mark.parametrize(
    "name",
    ["</script><b>", "<!--<script>", "</noscript><img src=x onerror=alert(1)>", "&lt;",
     "{{record}}", "\\u003c/script>", "\u2028", "]]>"],
)  # fmt: skip
def test_no_name_breaks_out(graph, name):
    nodes = tuple(
        dataclasses.replace(node, short_name=name, name=name, module=name, op=name)
        for node in graph.nodes[:2]
    )
    odd = dataclasses.replace(graph, name=name, nodes=nodes, edges=(), timing=None)
    text = html_of(odd, named_graphs(odd))
    usual_names = dataclasses.replace(graph, nodes=graph.nodes[:2], edges=(), timing=None)
    plain = html_of(usual_names, named_graphs(usual_names))
    parsed, usual = Page(text), Page(plain)
    assert [tag for tag, _ in parsed.tags] == [tag for tag, _ in usual.tags]
    assert parsed.links == usual.links
    assert GraphRecord.from_json(unpacked(parsed, "record")) == odd
    (view,) = json.loads(unpacked(parsed, "views"))
    assert {kernel["name"] for kernel in view["kernels"]} == {name}
    assert [frame["path"] for frame in view["frames"]] == ["", name]


def test_a_name_like_a_placeholder_stays_a_name(capture):
    odd = dataclasses.replace(capture, target="{{record}} {{table}}")
    assert (
        Page(html_of(odd, named_graphs(odd))).texts["h1"]
        == "graphkit capture: {{record}} {{table}}"
    )


def test_without_javascript_a_plain_table_names_every_node(page, capture):
    table = re.search(r'<noscript id="table">(.*?)</noscript>', page, re.DOTALL)[1]
    names = re.findall(r"<caption>(.*?)</caption>", table)
    assert names == [name for name, _ in named_graphs(capture)]
    rows = re.findall(r"<tr>(<td>.*?)</tr>", table)
    assert len(rows) == sum(len(graph.nodes) for graph in capture.graphs)
    assert rows[3] == (
        "<td>3</td><td>layers.0.attn.qkv</td><td>gemm_kernel</td>"
        "<td>1.25</td><td>8x1x1</td><td>128x1x1</td><td>aten::mm</td>"
    )


def test_everything_clickable_is_a_button_or_a_summary(page):
    """So that keys work as the mouse does; a table's row merely repeats its button."""
    script = page[page.rindex("<script>") :]
    pressed = re.findall(r'make\("(\w+)", \{[^}]*onclick', script)
    assert set(pressed) == {"button", "tr"}
    assert "prefers-color-scheme: dark" in page


def test_the_kernels_in_it_are_those_of_their_page(page, capture):
    graphs = named_graphs(capture)
    embedded = [each["kernels"] for each in json.loads(unpacked(Page(page), "views"))]
    assert len(embedded) == len(graphs)
    for index, kernels in enumerate(embedded):
        rows = kernels_page(graphs, index).rows
        assert [kernel["name"] for kernel in kernels] == [row.values[0] for row in rows]
        for kernel, row in zip(kernels, rows, strict=True):
            _, nodes, us, share, _, mean, _, *moved = row.values
            assert kernel["key"] == row.key
            assert (kernel["nodes"], kernel["us"]) == (nodes, us)
            assert (kernel["share"], kernel["mean us"]) == (share, mean)
            assert [kernel[name] for name in ("bytes, at most", "GB/s") if name in kernel] == moved
            assert kernel["modules"] == [module.values[0] for module in row.children]
    gemm = next(kernel for kernel in embedded[0] if kernel["name"] == "gemm_kernel")
    assert gemm["modules"] == ["layers.*.mlp (2 x)", "layers.*.attn.out (2 x)",
                               "layers.*.attn.qkv (2 x)"]  # fmt: skip
    assert {kernel["us"] for kernel in embedded[3]} == {None}


def test_a_time_that_is_no_number_is_one_that_was_not_measured(graph):
    nodes = (dataclasses.replace(graph.nodes[0], duration_us=float("nan")), *graph.nodes[1:])
    odd = dataclasses.replace(graph, nodes=nodes)
    (views,) = json.loads(unpacked(Page(html_of(odd, named_graphs(odd))), "views"))
    refresh = next(kernel for kernel in views["kernels"] if kernel["name"] == "refresh")
    assert (refresh["nodes"], refresh["us"], refresh["mean us"]) == (1, None, None)


@pytest.mark.parametrize(
    ("repeats", "sizes"), [(10, 1), (4, 5)], ids=["1760 nodes", "5 x 704 nodes"]
)
def test_the_page_of_a_large_model_has_less_than_2_mb(repeats, sizes):
    """The graph of four layers, repeated with other layers, addresses and times."""
    small = load_record(DATA / "h200-capture.json").graphs[0]
    large = dataclasses.replace(small, nodes=tuple(repeated(small.nodes, repeats)), timing=None)
    graphs = tuple(dataclasses.replace(large, name=f"VERIFY {size}") for size in range(sizes))
    record = CaptureRecord(
        target="8b", backend="cuda", environment=small.environment, modes=(), graphs=graphs
    )
    assert len(record.to_json()) > 2e6, "uncompressed, it would be larger"
    assert len(html_of(record, named_graphs(record))) < 2e6


def repeated(nodes, times):
    for place in range(times * len(nodes)):
        turn, node = place // len(nodes), nodes[place % len(nodes)]
        arguments = tuple(
            dataclasses.replace(each, pointers=tuple(moved(each.pointers, 4096 * place)))
            for each in node.arguments
        )
        yield dataclasses.replace(
            node, index=place, arguments=arguments, start_us=node.start_us + 400 * turn,
            module=node.module.replace("layers.", f"layers.{turn}"),
        )  # fmt: skip


def moved(pointers, by):
    return (dataclasses.replace(each, address=each.address + by) for each in pointers)


def test_no_text_of_a_record_is_read_as_html(page):
    """Elements hold texts of a record as text alone; ``DOMParser`` reads the escaped table."""
    script = page[page.rindex("<script>") :]
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacent|document\.write|eval|Function", script
    )
    assert script.count("parseFromString(") == script.count('$("table").textContent') == 1


def test_the_charts_have_labels_keys_and_a_text(page):
    tags = [(tag, facts) for tag, facts in Page(page).tags if "id" in facts]
    by_id = {facts["id"]: {"tag": tag, **facts} for tag, facts in tags}
    for chart, role in (("view", "group"), ("bars", "img"), ("icicle", "tree")):
        assert by_id[chart]["role"] == role
        names = by_id[chart]["aria-labelledby"], by_id[chart].get("aria-describedby", "")
        assert set(" ".join(names).split()) <= set(by_id)
    assert by_id["list"]["aria-label"] != by_id["kernels"]["aria-label"]
    assert by_id["view"]["tabindex"] == by_id["list"]["tabindex"] == "0"
    assert [by_id[name]["role"] for name in ("at", "count", "failure")] == [
        "status", "status", "alert",
    ]  # fmt: skip


def test_the_views_of_each_graph_have_a_value_for_each_node(page, capture):
    views = json.loads(unpacked(Page(page), "views"))
    for view, graph in zip(views, capture.graphs, strict=True):
        assert view["phases"] == phases_of(graph)
        assert view["parts"] == list(parts_of(graph).values())
        assert view["branches"] == branches_of(graph)
        assert [tuple(gap) for gap in view["gaps"]] == [
            (gap.begin, gap.us) for gap in graph.timeline.gaps
        ]
        frames, places = frames_of(graph)
        assert [Frame(**frame) for frame in view["frames"]] == frames
        assert view["places"] == places


@pytest.mark.parametrize("time", [float("nan"), float("inf"), 1e308])
def test_damaged_times_leave_valid_json(graph, time):
    nodes = [dataclasses.replace(node, start_us=time, duration_us=time) for node in graph.nodes]
    odd = dataclasses.replace(graph, nodes=tuple(nodes), timing=None)
    (view,) = json.loads(unpacked(Page(html_of(odd, named_graphs(odd))), "views"))
    assert set(view["branches"]) == {None}
    assert view["frames"][0]["width"] == len(nodes), "in nodes, because no time is known"


def test_every_colour_of_a_part_is_in_the_style(page):
    style = page[page.index("<style>") : page.index("</style>")]
    assert set(re.findall(r"\.part-(\w+)", style)) >= {*PARTS, "other"}


def test_nodes_with_equal_and_odd_indices_have_their_views(graph):
    nodes = tuple(dataclasses.replace(node, index=303) for node in graph.nodes)
    odd = dataclasses.replace(graph, nodes=nodes, edges=(), timing=None)
    (view,) = json.loads(unpacked(Page(html_of(odd, named_graphs(odd))), "views"))
    for name in ("phases", "parts", "branches", "places"):
        assert len(view[name]) == len(nodes)
