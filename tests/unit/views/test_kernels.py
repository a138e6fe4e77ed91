"""Nodes summed by kernel, and in the order of a replay."""

from __future__ import annotations

import dataclasses

import pytest

from graphkit.views import inspect_view
from graphkit.views.pages import GraphGroup, kernels_page, timeline_page


@pytest.fixture
def graphs(capture):
    """Return a measured graph with its name."""
    graph = capture.graphs[0]
    return ((graph.name, graph),)


def test_kernels_are_summed_and_the_most_expensive_is_first(graphs):
    ((_, graph),) = graphs
    page = kernels_page(GraphGroup(graphs), 0)
    names = [row.values[0] for row in page.rows]
    assert sorted(names) == sorted({node.short_name for node in graph.nodes})
    totals = [row.values[2] or 0 for row in page.rows]
    assert totals == sorted(totals, reverse=True)
    assert sum(row.values[1] for row in page.rows) == len(graph.nodes)
    assert sum(row.values[3] or 0 for row in page.rows) == pytest.approx(1)
    for row in page.rows:
        nodes = [node for node in graph.nodes if node.short_name == row.values[0]]
        measured = [node.duration_us for node in nodes if node.duration_us is not None]
        assert row.values[2] == (pytest.approx(sum(measured)) if measured else None)
        assert sum(child.values[1] for child in row.children) == row.values[1]


def test_equal_layers_share_a_row_whose_nodes_lead_to_their_pages(graphs):
    page = kernels_page(GraphGroup(graphs), 0)
    modules = {child.values[0]: child for row in page.rows for child in row.children}
    layers = next(child for name, child in modules.items() if "layers.*" in name)
    assert layers.values[0].endswith(" x)")
    assert {node.values[0] for node in layers.children} == {node.key for node in layers.children}
    node = layers.children[0]
    assert node.links["open"]().title.startswith(node.key)


def test_without_times_the_number_of_nodes_orders_kernels(graphs):
    ((name, graph),) = graphs
    nodes = tuple(dataclasses.replace(n, duration_us=None, start_us=None) for n in graph.nodes)
    bare = ((name, dataclasses.replace(graph, nodes=nodes, timing=None)),)
    page = kernels_page(GraphGroup(bare), 0)
    counts = [row.values[1] for row in page.rows]
    assert counts == sorted(counts, reverse=True)
    assert dict(page.facts)["sum of nodes"] == "not measured"
    assert timeline_page(GraphGroup(bare), 0).rows == ()
    assert timeline_page(GraphGroup(bare), 0).empty == "no replay of this graph was measured"


def test_a_timeline_has_starts_in_order_and_the_gaps_between(graphs):
    ((_, graph),) = graphs
    rows = timeline_page(GraphGroup(graphs), 0).rows
    assert [row.values[1] for row in rows] == sorted(row.values[1] for row in rows)
    measured = {node.index: node for node in graph.nodes if node.start_us is not None}
    assert len(rows) == len(measured)
    reached = 0.0
    for row in rows:
        node = measured[int(row.key[1:])]
        gap = node.start_us - reached
        assert row.values[3] == (pytest.approx(gap) if gap > 0 else None)
        reached = max(reached, node.start_us + (node.duration_us or 0))
        span = row.values[4]
        assert (span.begin, span.end) == (node.start_us, node.start_us + node.duration_us)


@pytest.mark.parametrize(("by", "title"), [("kernel", "kernels of"), ("time", "timeline of")])
def test_the_text_has_the_chosen_page_of_every_graph(capture, text, by, title):
    shown = text(inspect_view(capture, by=by), 160)
    for graph in capture.graphs:
        assert f"{title} {graph.name}" in shown
    assert "module and node" not in shown
    assert f"{title} {capture.graphs[0].name}" in text(inspect_view(capture.graphs[0], by=by), 160)
