"""HTML that loads nothing, embeds the record, and is readable without JavaScript."""

from __future__ import annotations

import base64
import dataclasses
import gzip
import html
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from graphkit.records import CaptureRecord, GraphRecord, load_record
from graphkit.views.formatting import plain
from graphkit.views.html import html_text
from graphkit.views.module_tree import node_parts
from graphkit.views.pages.kernels import kernels_page
from graphkit.views.pages.node import node_page
from graphkit.views.pages.page_model import GraphGroup
from graphkit.views.pages.timeline import replay_spans
from graphkit.views.selection import named_graphs, select_graphs
from graphkit.views.text.page import flatten

DATA = Path(__file__).parents[2] / "data"

PARTS = (
    "refresh", "metadata", "draft", "build", "verify", "accept", "extend", "norm", "attn", "mlp",
    "embed", "head", "other",
)  # fmt: skip

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


def unpacked(parsed, name="record"):
    """The record, or the graphs that the script draws."""
    return json.loads(gzip.decompress(base64.b64decode(parsed.texts["data"])))[name]


def drawn(page):
    """What the script draws, by graph."""
    return unpacked(Page(page), "graphs")


@pytest.fixture(scope="module")
def page(capture):
    return html_text(capture, named_graphs(capture))


def test_it_loads_nothing(page):
    parsed = Page(page)
    assert set(parsed.links) == {"data:,"}
    text = re.sub(r'data-encoding="gzip base64">[^<]*<', "", page)
    assert not re.search(r"https?://|//[a-z]|url\(|@import|fetch\(|XMLHttp|import\(", text)
    (policy,) = (a["content"] for t, a in parsed.tags if a.get("http-equiv"))
    assert policy.startswith("default-src 'none'")


def test_the_record_in_it_is_the_record(page, capture):
    parsed = Page(page)
    assert CaptureRecord.from_json(unpacked(parsed)) == capture
    assert parsed.texts["title"] == parsed.texts["h1"] == "graphkit capture: tiny"


def test_a_selection_holds_its_graphs_alone(capture):
    page = html_text(capture, select_graphs(capture, mode="DRAFT", batch_size=4))
    record = CaptureRecord.from_json(unpacked(Page(page)))
    assert record == dataclasses.replace(capture, graphs=capture.graphs[2:3])


def test_it_opens_with_the_first_graph_that_has_nodes(compiled, capture):
    empty = dataclasses.replace(compiled, graphs=compiled.graphs[:1])
    for record, first in ((compiled, "1"), (capture, "0"), (empty, "0")):
        tags = Page(html_text(record, named_graphs(record))).tags
        assert [facts["data-first"] for tag, facts in tags if tag == "select"] == [first]


def test_a_graph_alone_is_its_own_record(graph):
    page = html_text(graph, named_graphs(graph))
    assert GraphRecord.from_json(unpacked(Page(page))) == graph


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
    text = html_text(odd, named_graphs(odd))
    usual_names = dataclasses.replace(graph, nodes=graph.nodes[:2], edges=(), timing=None)
    parsed, usual = Page(text), Page(html_text(usual_names, named_graphs(usual_names)))
    assert [tag for tag, _ in parsed.tags] == [tag for tag, _ in usual.tags]
    assert parsed.links == usual.links
    assert GraphRecord.from_json(unpacked(parsed)) == odd
    (view,) = drawn(text)
    assert {kernel["cells"][0] for kernel in view["kernels"]["rows"]} == {plain(name)}
    assert [row["name"] for row in view["tree"]] == [plain(name)]


def test_a_name_like_a_placeholder_stays_a_name(capture):
    odd = dataclasses.replace(capture, target="{{data}} {{text}}")
    title = Page(html_text(odd, named_graphs(odd))).texts["h1"]
    assert title == "graphkit capture: {{data}} {{text}}"


def test_without_javascript_the_first_graph_is_text(page, capture):
    text = html.unescape(re.search(r"<noscript><pre>(.*?)</pre></noscript>", page, re.DOTALL)[1])
    graph = capture.graphs[0]
    assert text.startswith(f"{graph.name}\n")
    assert "critical path" in text
    for node in graph.nodes:
        assert node.short_name in text
    assert re.search(r"gemm_kernel +1 +1\.25", text)


def test_everything_clickable_is_a_button_or_a_summary(page):
    """So that keys work as the mouse does; a table's row merely repeats its button."""
    script = page[page.rindex("<script>") :]
    pressed = re.findall(r'make\("(\w+)", \{[^}]*onclick', script)
    assert set(pressed) == {"button", "tr"}
    assert "prefers-color-scheme: dark" in page


def test_the_kernels_in_it_are_those_of_their_page(page, capture):
    graphs = named_graphs(capture)
    views = drawn(page)
    assert len(views) == len(graphs)
    for index, view in enumerate(views):
        shown = kernels_page(GraphGroup(graphs), index)
        heads = view["kernels"]["heads"][1:-1]
        kept = [0, *(at for at, column in enumerate(shown.columns) if column.name in heads)]
        for kernel, row in zip(view["kernels"]["rows"], shown.rows, strict=True):
            cells = shown.cells(row)
            for at, cell in zip(kept, kernel["cells"], strict=True):
                assert cell == (cells[at] or cell)
            assert kernel["modules"] == [module.values[0] for module in row.children]
            nodes = graphs[index][1].nodes
            assert [nodes[at] for at in kernel["nodes"]] == list(row.nodes)
    rows = views[0]["kernels"]["rows"]
    (gemm,) = (kernel for kernel in rows if kernel["cells"][0] == "gemm_kernel")
    assert gemm["modules"] == [
        "layers.*.mlp (2 x)", "layers.*.attn.out (2 x)", "layers.*.attn.qkv (2 x)",
    ]  # fmt: skip


def test_a_time_that_is_no_number_is_one_that_was_not_measured(graph):
    nodes = (dataclasses.replace(graph.nodes[0], duration_us=float("nan")), *graph.nodes[1:])
    odd = dataclasses.replace(graph, nodes=nodes)
    (view,) = drawn(html_text(odd, named_graphs(odd)))
    assert view["nodes"][0]["us"] is None
    assert view["us"] is None


@pytest.mark.slow
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
    assert len(html_text(record, named_graphs(record))) < 2e6


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
    """Elements hold texts of a record as text alone."""
    script = page[page.rindex("<script>") :]
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacent|document\.write|eval|Function|DOMParser", script
    )


def test_the_charts_have_labels_keys_and_a_text(page):
    tags = [(tag, facts) for tag, facts in Page(page).tags if "id" in facts]
    by_id = {facts["id"]: {"tag": tag, **facts} for tag, facts in tags}
    assert by_id["icicle"]["aria-hidden"] == "true", "the tree has the same values"
    for chart, role in (("view", "group"), ("bars", "img")):
        assert by_id[chart]["role"] == role
        names = by_id[chart]["aria-labelledby"], by_id[chart].get("aria-describedby", "")
        assert set(" ".join(names).split()) <= set(by_id)
    assert by_id["list"]["aria-label"] != by_id["kernels"]["aria-label"]
    assert by_id["view"]["tabindex"] == by_id["list"]["tabindex"] == "0"
    assert [by_id[name]["role"] for name in ("at", "count", "failure")] == [
        "status", "status", "alert",
    ]  # fmt: skip


def test_the_drawing_of_a_graph_is_what_python_computed(page, capture):
    views = drawn(page)
    for view, graph in zip(views, capture.graphs, strict=True):
        parts = node_parts(graph)
        for drawn_node, node in zip(view["nodes"], graph.nodes, strict=True):
            assert drawn_node.items() >= {
                "index": f"{node.index}", "name": node.short_name,
                "part": parts[node.index] or "other", "us": node.duration_us,
                "holder": -1 if node.parent is None else node.parent,
            }.items()  # fmt: skip
        spans = replay_spans(graph)
        assert [graph.nodes[at] for at, *_ in view["bars"]] == [node for node, _ in spans]
        assert [begin for _, begin, _, _ in view["bars"]] == pytest.approx(
            [span.begin for _, span in spans]
        )
        assert set(leaves(view["tree"])) == set(range(len(graph.nodes)))


def leaves(rows):
    """The positions of the nodes in rows of the tree."""
    for row in rows:
        yield from [row] if isinstance(row, int) else leaves(row["rows"])


def test_the_panel_of_a_node_has_the_texts_of_its_page(page, capture):
    for view, graph in zip(drawn(page), capture.graphs, strict=True):
        for place, node in enumerate(view["nodes"]):
            shown = node_page(graph, place)
            texts = {shown.cells(line.row) for line in flatten(shown.rows)}
            assert {tuple(fact) for fact in node["facts"]} <= {cells[:2] for cells in texts}
            assert {tuple(cells) for cells in node["arguments"]} <= texts


@pytest.mark.parametrize("time", [float("nan"), float("inf"), 1e308])
def test_damaged_times_leave_valid_json(graph, time):
    nodes = [dataclasses.replace(node, start_us=time, duration_us=time) for node in graph.nodes]
    odd = dataclasses.replace(graph, nodes=tuple(nodes), timing=None)
    (view,) = drawn(html_text(odd, named_graphs(odd)))
    assert view["bars"] == []


def test_every_colour_of_a_part_is_in_the_style(page):
    style = page[page.index("<style>") : page.index("</style>")]
    assert set(re.findall(r"\.part-(\w+)", style)) >= {*PARTS}


def test_nodes_with_equal_and_odd_indices_are_all_drawn(graph):
    nodes = tuple(dataclasses.replace(node, index=303) for node in graph.nodes)
    odd = dataclasses.replace(graph, nodes=nodes, edges=(), timing=None)
    (view,) = drawn(html_text(odd, named_graphs(odd)))
    assert len(view["nodes"]) == len(nodes)
    assert len(view["bars"]) == sum(node.start_us is not None for node in nodes)


LAYERS = "target.model.layers."

RECORD = Path(__file__).parents[2] / "data" / "h200-8b-step.json"


@pytest.fixture(scope="module")
def record():
    return load_record(RECORD)


def test_the_page_is_small(record):
    assert len(html_text(record, named_graphs(record)).encode()) < 2e6


def test_phases_and_layers_are_recorded(record):
    (graph,) = record.graphs
    phases = {node.scope.partition("/")[0] for node in graph.nodes}
    assert phases >= {"draft", "build", "verify", "accept", "extend"}
    layers = {node.module.split(".")[3] for node in graph.nodes if LAYERS in node.module}
    assert len(layers) == 32
