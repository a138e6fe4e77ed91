"""The page of kernels, the bytes that they address, and the timeline."""

from __future__ import annotations

import dataclasses

import pytest

from graphkit.records import Argument, Environment, GraphRecord, Node, Pointer
from graphkit.views import inspect_view
from graphkit.views.html import drawing
from graphkit.views.pages.kernels import addressed_bytes, kernels_page
from graphkit.views.pages.page_model import GraphGroup
from graphkit.views.pages.timeline import timeline_page


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


ENVIRONMENT = Environment(device="d", torch="2", triton="3", cuda="", driver="", graphkit="0")


@pytest.fixture
def make_record():
    def make(nodes):
        return GraphRecord(name="g", backend="cuda", environment=ENVIRONMENT, nodes=tuple(nodes))

    return make


def node(*spans):
    """A node with an argument for each (address, size)."""
    arguments = tuple(
        Argument(
            size=8, kind="pointer", text="x",
            pointers=(Pointer(address=address, memory="weight", name="x", size=size),),
        )
        for address, size in spans
    )  # fmt: skip
    return Node(index=0, kind="kernel", name="k", short_name="k", arguments=arguments)


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ([node((64, 8))], 8),
        ([node((64, 8), (128, 16))], 24),
        ([node((64, 8), (64, 8))], 8),
        ([node((64, 16), (72, 16))], 24),
        ([node((64, 100), (72, 16), (150, 50))], 136),
        ([node((64, 8)), node((64, 8))], 16),
        ([node()], None),
        ([node((64, 8), (128, 0))], None),
        ([node((64, 8)), node((128, 0))], None),
        ([], None),
    ],
)
def test_distinct_bytes_of_each_node_are_summed(nodes, expected):
    assert addressed_bytes(nodes) == expected


def test_a_rate_that_no_memory_reaches_is_left_out(make_record):
    """The kernel used a part of the tensor, such as some rows of an embedding."""
    reads = node((64, 1_000_000_000))
    slow, fast = (dataclasses.replace(reads, duration_us=us) for us in (250.0, 2.0))
    for each, expected in ((slow, 4000.0), (fast, None)):
        (row,) = kernels_page(GraphGroup((("g", make_record([each])),)), 0).rows
        assert row.values[-2:] == (1_000_000_000, expected)


def test_the_kernels_of_a_graph_show_bytes_and_bytes_per_time(make_record, text):
    weight, unknown = node((64, 3_000_000)), node((64, 0))
    nodes = [
        dataclasses.replace(each, index=index, name=name, short_name=name, duration_us=us)
        for index, (each, name, us) in enumerate([
            (weight, "gemm", 10.0), (weight, "gemm", 20.0), (unknown, "gelu", 5.0),
            (weight, "unmeasured", None),
        ])
    ]  # fmt: skip
    page = kernels_page(GraphGroup((("g", make_record(nodes)),)), 0)
    assert [column.name for column in page.columns][-2:] == ["bytes, at most", "GB/s"]
    found = {row.values[0]: row.values[-2:] for row in page.rows}
    assert found == {
        "gemm": (6_000_000, 200.0), "gelu": (None, None), "unmeasured": (3_000_000, None),
    }  # fmt: skip
    drawn = drawing((("g", make_record(nodes)),))
    cells = [kernel["cells"] for kernel in drawn[0]["kernels"]["rows"]]
    assert {(name, *numbers[-2:]) for name, *numbers in cells} == {
        ("gemm", "5.7 MiB", "200.0"), ("gelu", "unknown", "-"), ("unmeasured", "2.9 MiB", "-"),
    }  # fmt: skip
    shown = text(inspect_view(make_record(nodes), by="kernel"), 160)
    assert "5.7 MiB  200.0" in shown


def test_a_record_without_sizes_has_no_such_columns(make_record):
    page = kernels_page(GraphGroup((("g", make_record([node((64, 0))])),)), 0)
    assert page.columns[-1].name == "grid"
    assert len(page.rows[0].values) == len(page.columns)
