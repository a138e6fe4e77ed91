"""The status sums the nodes that pass a filter, on every page of a graph alike."""

from __future__ import annotations

from dataclasses import replace

import pytest

from graphkit.records import Node
from graphkit.views.pages.graph import graph_page
from graphkit.views.pages.kernels import kernels_page
from graphkit.views.pages.page_model import GraphGroup
from graphkit.views.pages.timeline import timeline_page
from graphkit.views.tui.listing import Listing


@pytest.fixture
def graph(capture):
    return next(graph for graph in capture.graphs if graph.name == "TARGET_VERIFY 8")


def listings(graph):
    graphs = ((graph.name, graph),)
    group = GraphGroup(graphs)
    pages = graph_page(group, 0), kernels_page(group, 0), timeline_page(group, 0)
    return [Listing(page) for page in pages]


def matching(graph, *words):
    """The nodes whose text contains all words, as the search of the HTML page finds them."""
    texts = ((n, f"{n.name} {n.short_name} {n.module} {n.op} {n.source}") for n in graph.nodes)
    return [n for n, text in texts if all(word.casefold() in text.casefold() for word in words)]


@pytest.mark.parametrize(
    "words",
    ["o_proj", "splitK", "self_attn", "layers.0", "model.py", "aten::mm", "splitK layers.1"],
)
def test_a_filter_sums_the_same_nodes_on_every_page(graph, words):
    nodes = matching(graph, *words.split())
    time, whole = (sum(n.duration_us for n in some) for some in (nodes, graph.nodes))
    assert 0 < len(nodes) < len(graph.nodes)
    total = f"({len(nodes)} nodes, {time:.2f} us, {time / whole:.1%})"
    for listing in listings(graph):
        listing.filter(words)
        assert f"filter {words} {total}" in listing.status


def test_a_module_that_matches_brings_its_nodes_once(graph):
    listing = listings(graph)[0]
    listing.filter("kind:module")
    inside = [node for node in graph.nodes if node.module.startswith("model")]
    assert f"({len(inside)} nodes, " in listing.status[-1]


def test_a_filter_without_a_match_sums_to_no_nodes(graph):
    for listing in listings(graph):
        listing.filter("no such thing")
        assert listing.status[-1] == "filter no such thing (0 nodes)"


def test_without_times_the_sum_is_the_number_of_nodes(graph):
    nodes = tuple(replace(node, duration_us=None, start_us=None) for node in graph.nodes)
    listing = listings(replace(graph, nodes=nodes, timing=None))[0]
    listing.filter("splitK")
    assert listing.status[-1] == "filter splitK (4 nodes)"


def test_a_node_inside_a_measured_one_adds_no_time(graph):
    holder = Node(
        index=0, kind="child graph", name="child", short_name="child", module="m",
        start_us=0.0, duration_us=4.0,
    )  # fmt: skip
    inside = replace(holder, index=1, kind="kernel", parent=0, duration_us=3.0)
    other = replace(holder, index=2, kind="kernel", name="k", short_name="k")
    for listing in listings(replace(graph, nodes=(holder, inside, other), edges=(), timing=None)):
        listing.filter("child")
        assert listing.status[-1] == "filter child (2 nodes, 4.00 us, 50.0%)"
