"""Nodes and edges of a graph, as the driver tells them."""

from __future__ import annotations

import struct
import sys
from types import SimpleNamespace

import pytest

from graphkit.errors import InspectError
from graphkit.graphs.walk.driver_nodes import DriverEdge, DriverWalk


def words(node):
    """A copy's or fill's numbers by name."""
    return {p.name: int.from_bytes(p.data, "little") for p in node.parameters}


def test_a_kernel_node_has_all_its_facts(driver):
    func = driver.function("_ZN12_GLOBAL__N_15plainEi", (0, 4), registers=40, shared=128)
    node = driver.kernel_node(
        func, grid=(4, 2, 1), block=(64, 1, 3), shared=1024,
        pointers=driver.parameters(struct.pack("<i", 7)),
        cluster=(2, 1, 1), cooperative=1, priority=-5,
    )  # fmt: skip
    (found,) = DriverWalk(driver.graph(node)).nodes
    assert (found.kind, found.name) == ("kernel", "(anonymous namespace)::plain(int)")
    assert (found.grid, found.block, found.cluster) == ((4, 2, 1), (64, 1, 3), (2, 1, 1))
    assert (found.registers, found.shared_memory_bytes) == (40, 128 + 1024)
    assert found.attributes == {"cooperative": "yes", "priority": "-5"}
    assert [(p.offset, p.size, p.data) for p in found.parameters] == [(0, 4, b"\7\0\0\0")]
    assert found.parent is None


def test_what_is_as_usual_is_not_said(driver):
    (found,) = DriverWalk(driver.graph(driver.kernel_node(driver.function("k")))).nodes
    assert (found.cluster, found.attributes, found.parameters) == ((), {}, ())


def test_a_device_need_not_know_an_attribute(driver):
    """Older ones have no clusters."""
    node = driver.kernel_node(
        driver.function("k"), cluster="refused", cooperative="refused", priority="refused"
    )
    (found,) = DriverWalk(driver.graph(node)).nodes
    assert (found.cluster, found.attributes) == ((), {})


def test_kernels_of_a_library_have_handles_of_their_own(driver):
    func = driver.function("loaded", (0, 8))
    kerns = [driver.function(f"of a library {i}", (0, 4), as_kernel=True) for i in (1, 2)]
    nodes = [driver.kernel_node(func), *(driver.kernel_node(kern=kern) for kern in kerns)]
    found = DriverWalk(driver.graph(*nodes, driver.kernel_node(func))).nodes
    assert [node.name for node in found] == [
        "loaded", "of a library 1", "of a library 2", "loaded",
    ]  # fmt: skip
    assert [node.parameters[0].size for node in found] == [8, 4, 4, 8]


COPY = {"WidthInBytes": 64, "Height": 1, "Depth": 1, "srcHost": 0, "dstHost": 0}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"srcDevice": 0x5000, "dstDevice": 0x6000}, {"source": 0x5000, "target": 0x6000}),
        ({"srcHost": 0x7000, "dstDevice": 0x6000}, {"source": 0x7000, "target": 0x6000}),
        ({"srcDevice": 0x5000, "dstHost": 0x8000}, {"source": 0x5000, "target": 0x8000}),
        ({"Height": 3, "Depth": 2}, {"bytes": 384}),
        ({"Height": 0, "Depth": 0}, {"bytes": 64}),
    ],
)
def test_a_copy_says_from_where_to_where_and_how_much(driver, changes, expected):
    params = SimpleNamespace(**{"srcDevice": 0, "dstDevice": 0, **COPY, **changes})
    (found,) = DriverWalk(driver.graph(driver.node("MEMCPY", params=params))).nodes
    assert found.kind == "memcpy"
    assert words(found).items() >= expected.items()
    assert found.name == f"memcpy of {words(found)['bytes']} bytes"


def test_a_fill_says_with_what(driver):
    params = SimpleNamespace(dst=0x5000, value=0xFF, elementSize=4, width=10, height=1)
    (found,) = DriverWalk(driver.graph(driver.node("MEMSET", params=params))).nodes
    assert (found.kind, found.name) == ("memset", "memset of 40 bytes")
    assert words(found) == {
        "target": 0x5000, "value": 0xFF, "element": 4, "width": 10, "height": 1,
    }  # fmt: skip


def test_other_nodes_are_called_by_their_kind(driver):
    nodes = [driver.node(kind) for kind in ("HOST", "EMPTY", "LATER_THING")]
    found = DriverWalk(driver.graph(*nodes)).nodes
    assert [(node.kind, node.name) for node in found] == [
        ("host", "host"), ("empty", "empty"), ("later thing", "later thing"),
    ]  # fmt: skip


def test_edges_join_nodes_by_place_and_say_which_are_programmatic(driver):
    nodes = [driver.node("EMPTY") for _ in range(3)]
    walk = DriverWalk(driver.graph(*nodes, edges=[(0, 1), (0, 2, 1)]))
    assert walk.edges == [DriverEdge(0, 1, False), DriverEdge(0, 2, True)]


def test_an_empty_graph_has_nothing(driver):
    walk = DriverWalk(driver.graph())
    assert (walk.nodes, walk.edges) == ([], [])


def test_child_graphs_stand_after_all_of_their_parents(driver):
    inner = driver.graph(driver.node("EMPTY"), driver.node("EMPTY"), edges=[(0, 1)])
    middle = driver.graph(driver.node("HOST"), driver.node("GRAPH", graph=inner), edges=[(1, 0)])
    outer = [driver.node("GRAPH", graph=middle), driver.node("GRAPH", graph=inner)]
    walk = DriverWalk(driver.graph(*outer, driver.node("HOST"), edges=[(0, 1), (1, 2)]))
    assert [(node.kind, node.parent) for node in walk.nodes] == [
        ("child graph", None), ("child graph", None), ("host", None),
        ("host", 0), ("child graph", 0), ("empty", 4), ("empty", 4), ("empty", 1), ("empty", 1),
    ]  # fmt: skip
    ends = [(edge.source, edge.target) for edge in walk.edges]
    assert ends == [(0, 1), (1, 2), (4, 3), (5, 6), (7, 8)]


def drawn(number, *handles, edges=(), more=""):
    """A graph as the driver draws it."""
    graph = f"graph_{number}_node_"
    lines = [
        f'"{graph}{i}"[label="{{ID | {i}|node handle: {handle:#x}{more}}}"];'
        for i, handle in enumerate(handles)
    ]
    lines += [f'"{graph}{a}" -> "{graph}{b}"' for a, b in edges]
    return "\n".join([f"subgraph cluster_{number} {{", *lines, "}", ""])


def test_bodies_are_entered_through_the_drawing(driver):
    kernel = driver.kernel_node(driver.function("inner"))
    child = driver.node("GRAPH", graph=driver.graph(driver.node("EMPTY")))
    fork, after = driver.node("CONDITIONAL"), driver.node("HOST")
    driver.drawing = (
        drawn(1, fork, more="|CONDITIONAL|graph_2}|graph_3}")
        + drawn(2, kernel, child, edges=[(0, 1)])
        + drawn(3, driver.node("HOST"))
    )
    walk = DriverWalk(driver.graph(fork, after, edges=[(0, 1)]))
    assert [(node.name, node.parent) for node in walk.nodes] == [
        ("conditional", None), ("host", None), ("inner", 0), ("child graph", 0), ("empty", 3),
        ("host", 0),
    ]  # fmt: skip
    assert [(edge.source, edge.target) for edge in walk.edges] == [(0, 1), (2, 3)]


def test_a_conditional_that_is_not_drawn_stays_closed(driver):
    assert len(DriverWalk(driver.graph(driver.node("CONDITIONAL"))).nodes) == 1


def test_without_bindings_the_way_to_get_them_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda", None)
    with pytest.raises(InspectError, match=r"bindings are missing.*graphkit\[cuda\]"):
        DriverWalk(1)
