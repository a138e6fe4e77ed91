"""Bytes of the tensors that nodes address."""

from __future__ import annotations

import dataclasses

import pytest

from graphkit.records import Argument, Environment, GraphRecord, Node, Pointer
from graphkit.views import inspect_view
from graphkit.views.html_data import drawing
from graphkit.views.pages import GraphGroup, kernels_page
from graphkit.views.pages.kernels import addressed_bytes

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
    texts, kernels = drawn["texts"], drawn["graphs"][0]["kernels"]
    cells = [[texts[at] for at in kernel["cells"]] for kernel in kernels["rows"]]
    assert {(name, *numbers[-2:]) for name, *numbers in cells} == {
        ("gemm", "5.7 MiB", "200.0"), ("gelu", "unknown", "-"), ("unmeasured", "2.9 MiB", "-"),
    }  # fmt: skip
    shown = text(inspect_view(make_record(nodes), by="kernel"), 160)
    assert "5.7 MiB  200.0" in shown


def test_a_record_without_sizes_has_no_such_columns(make_record):
    page = kernels_page(GraphGroup((("g", make_record([node((64, 0))])),)), 0)
    assert page.columns[-1].name == "grid"
    assert len(page.rows[0].values) == len(page.columns)
