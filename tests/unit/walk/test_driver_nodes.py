"""Nodes and edges of a graph, read through the driver API."""

from __future__ import annotations

import struct
from types import SimpleNamespace

import pytest

from graphkit.graphs.walk.driver_nodes import DriverWalk
from graphkit.records import Edge


def operands(node):
    """Operands of a memcpy or memset by name."""
    return {p.name: int.from_bytes(p.data, "little") for p in node.parameters}


def test_a_kernel_node_has_all_fields(driver):
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


def test_default_launch_attributes_are_left_out(driver):
    (found,) = DriverWalk(driver.graph(driver.kernel_node(driver.function("k")))).nodes
    assert (found.cluster, found.attributes, found.parameters) == ((), {}, ())


def test_a_device_may_not_support_an_attribute(driver):
    """Older devices have no clusters."""
    node = driver.kernel_node(
        driver.function("k"), cluster="refused", cooperative="refused", priority="refused"
    )
    (found,) = DriverWalk(driver.graph(node)).nodes
    assert (found.cluster, found.attributes) == ((), {})


def test_kernels_of_lazily_loaded_libraries_have_their_own_handles(driver):
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
def test_a_copy_has_source_target_and_size(driver, changes, expected):
    params = SimpleNamespace(**{"srcDevice": 0, "dstDevice": 0, **COPY, **changes})
    (found,) = DriverWalk(driver.graph(driver.node("MEMCPY", params=params))).nodes
    assert found.kind == "memcpy"
    assert operands(found).items() >= expected.items()
    assert found.name == f"memcpy of {operands(found)['bytes']} bytes"


def test_a_fill_has_target_value_and_extent(driver):
    params = SimpleNamespace(dst=0x5000, value=0xFF, elementSize=4, width=10, height=1)
    (found,) = DriverWalk(driver.graph(driver.node("MEMSET", params=params))).nodes
    assert (found.kind, found.name) == ("memset", "memset of 40 bytes")
    assert operands(found) == {
        "target": 0x5000, "value": 0xFF, "element": 4, "width": 10, "height": 1,
    }  # fmt: skip


def test_other_nodes_are_named_by_their_kind(driver):
    nodes = [driver.node(kind) for kind in ("HOST", "EMPTY", "NEW_KIND")]
    found = DriverWalk(driver.graph(*nodes)).nodes
    assert [(node.kind, node.name) for node in found] == [
        ("host", "host"), ("empty", "empty"), ("new kind", "new kind"),
    ]  # fmt: skip


def test_edges_have_node_indices_and_may_be_programmatic(driver):
    nodes = [driver.node("EMPTY") for _ in range(3)]
    walk = DriverWalk(driver.graph(*nodes, edges=[(0, 1), (0, 2, 1)]))
    assert walk.edges == [Edge(source=0, target=1), Edge(source=0, target=2, kind="programmatic")]


def test_an_empty_graph_has_no_nodes(driver):
    walk = DriverWalk(driver.graph())
    assert (walk.nodes, walk.edges) == ([], [])


def test_nodes_of_child_graphs_follow_the_graph_around_them(driver):
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


def dot_graph(number, *handles, edges=(), more=""):
    """A graph in the form of ``cuGraphDebugDotPrint``."""
    graph = f"graph_{number}_node_"
    lines = [
        f'"{graph}{i}"[label="{{ID | {i}|node handle: {handle:#x}{more}}}"];'
        for i, handle in enumerate(handles)
    ]
    lines += [f'"{graph}{a}" -> "{graph}{b}"' for a, b in edges]
    return "\n".join([f"subgraph cluster_{number} {{", *lines, "}", ""])


def test_bodies_of_conditionals_are_walked(driver):
    kernel = driver.kernel_node(driver.function("inner"))
    child = driver.node("GRAPH", graph=driver.graph(driver.node("EMPTY")))
    fork, after = driver.node("CONDITIONAL"), driver.node("HOST")
    driver.dot = (
        dot_graph(1, fork, more="|CONDITIONAL|graph_2}|graph_3}")
        + dot_graph(2, kernel, child, edges=[(0, 1)])
        + dot_graph(3, driver.node("HOST"))
    )
    walk = DriverWalk(driver.graph(fork, after, edges=[(0, 1)]))
    assert [(node.name, node.parent) for node in walk.nodes] == [
        ("conditional", None), ("host", None), ("inner", 0), ("child graph", 0), ("empty", 3),
        ("host", 0),
    ]  # fmt: skip
    assert [(edge.source, edge.target) for edge in walk.edges] == [(0, 1), (2, 3)]


def test_a_conditional_without_printed_bodies_is_one_node(driver):
    assert len(DriverWalk(driver.graph(driver.node("CONDITIONAL"))).nodes) == 1


def test_the_number_of_driver_calls_per_node_is_fixed(driver, monkeypatch):
    """A walk takes about 10 us per node, which is the time of these calls."""

    def count_calls(nodes):
        calls = []
        function = driver.function("k", (0, 8), (8, 4))
        graph = driver.graph(*(driver.kernel_node(function) for _ in range(nodes)))
        for name in (name for name in dir(type(driver)) if name.startswith("cu")):
            call = getattr(type(driver), name)
            monkeypatch.setattr(
                driver, name, lambda *a, f=call, n=name: calls.append(n) or f(driver, *a)
            )
        assert len(DriverWalk(graph).nodes) == nodes
        return len(calls)

    one, two, many = map(count_calls, (1, 2, 50))
    assert two - one == 5, "kind, parameters and three launch attributes"
    assert many - one == 49 * (two - one), "kernels are queried once"
