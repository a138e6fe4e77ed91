"""The tree of modules, and layers of large graphs that equal an earlier one."""

from __future__ import annotations

import dataclasses
import re
from xml.etree import ElementTree as ET

import pytest

from graphkit.records import Edge, Environment, GraphRecord, Node
from graphkit.views import FORMATS, Export
from graphkit.views.module_tree import module_tree


@pytest.fixture
def tree_of(make_graph):
    """``tree_of((module, facts), ...)``: the tree of such nodes."""

    def make(*rows):
        nodes = [
            {"kind": "kernel", "name": "k", "short_name": f"k{i}", "module": module, **facts}
            for i, (module, facts) in enumerate(rows)
        ]
        return module_tree(make_graph("DRAFT", 1, measured=False, places=lambda _: nodes))

    return make


def us(duration):
    return {"duration_us": duration}


def shape(branch):
    own = [node.short_name for node in branch.nodes]
    return branch.path, own, [shape(child) for child in branch.children]


def test_the_tree_follows_the_paths_in_order_of_the_first_node(tree_of):
    tree = tree_of(("b.y", {}), ("", {}), ("a", {}), ("b.x", {}), ("b", {}), ("b.y", {}))
    below = [("b.y", ["k0", "k5"], []), ("b.x", ["k3"], [])]
    assert shape(tree) == ("", ["k1"], [("b", ["k4"], below), ("a", ["k2"], [])])
    assert [child.name for child in tree.children[0].children] == ["y", "x"]
    assert (tree.name, len(tree.all_nodes), len(tree.children[0].all_nodes)) == ("", 6, 4)


def test_all_nodes_are_in_record_order(graph):
    tree = module_tree(graph)
    assert tree.all_nodes == graph.nodes
    (layer,) = [child for child in tree.children if child.path == "layers"]
    assert [node.index for node in layer.all_nodes] == list(range(2, 18))


def test_every_node_is_in_one_branch(graph):
    def own(branch):
        return [*branch.nodes, *(node for child in branch.children for node in own(child))]

    assert sorted(node.index for node in own(module_tree(graph))) == list(range(len(graph.nodes)))


def test_durations_are_summed(tree_of):
    tree = tree_of(("a", us(1.0)), ("a.b", us(2.0)), ("a.b", {}), ("c", {}))
    a, c = tree.children
    assert (tree.duration_us, a.duration_us, a.children[0].duration_us) == (3.0, 3.0, 2.0)
    assert c.duration_us is None


def test_a_node_inside_a_measured_node_counts_once(tree_of):
    """The outer node is in ``a``, an inner one in ``b``."""
    held = {"parent": 0, **us(3.0)}
    tree = tree_of(("a", us(10.0)), ("a", held), ("b", held), ("c", us(1.0)))
    a, b, _ = tree.children
    assert (tree.duration_us, a.duration_us, b.duration_us) == (11.0, 10.0, 3.0)


def test_a_node_inside_an_unmeasured_node_counts(tree_of):
    tree = tree_of(("a", us(10.0)), ("a", {"parent": 0}), ("a", {"parent": 1, **us(4.0)}))
    assert tree.duration_us == 10.0
    tree = tree_of(("a", {}), ("a", {"parent": 0, **us(3.0)}), ("a", {"parent": 0, **us(4.0)}))
    assert tree.duration_us == 7.0


def test_an_inner_node_without_a_module_inherits_the_outer_one(tree_of):
    tree = tree_of(("a.b", {}), ("", {"parent": 0}), ("", {"parent": 1}), ("c", {"parent": 0}))
    assert shape(tree)[2] == [("a", [], [("a.b", ["k0", "k1", "k2"], [])]), ("c", ["k3"], [])]


@pytest.mark.parametrize("parent", [0, 1, 7, -1])
def test_a_damaged_record_has_a_tree(tree_of, parent):
    tree = tree_of(("a..b", {"parent": parent, **us(1.0)}), (".", us(2.0)))
    assert shape(tree) == ("", ["k1"], [("a", [], [("a.b", ["k0"], [])])])
    assert tree.duration_us == 3.0


def test_an_empty_graph_is_a_root_alone(graph):
    tree = module_tree(dataclasses.replace(graph, nodes=()))
    assert (tree.children, tree.nodes, len(tree.all_nodes), tree.duration_us) == ((), (), 0, None)


ENVIRONMENT = Environment(device="d", torch="2", triton="3", cuda="", driver="", graphkit="0")


def graph_of(layers, *, kernels=10, other=None, scope="", mode="DECODE"):
    """An embedding, layers of ``kernels`` nodes and a head; the layer ``other`` differs."""
    names = [("embed", "gather")]
    for layer in range(layers):
        names += [(f"layers.{layer}.mlp", f"k{kernel}") for kernel in range(kernels)]
        if layer == other:
            names[-1] = (f"layers.{layer}.mlp", "another")
    names.append(("head", "gemm"))
    nodes = tuple(
        Node(
            index=i, kind="kernel", name=name, short_name=name, module=module, scope=scope,
            duration_us=2.0, start_us=2.0 * i,
        )
        for i, (module, name) in enumerate(names)
    )  # fmt: skip
    edges = tuple(Edge(source=i, target=i + 1) for i in range(len(nodes) - 1))
    return GraphRecord(
        name="large", backend="cuda", mode=mode, environment=ENVIRONMENT, nodes=nodes, edges=edges
    )


def test_a_picture_of_3000_nodes_has_the_rows_that_the_screen_opens_with():
    svg = FORMATS[".svg"](Export(graph_of(60, kernels=50)))
    shown = "".join(ET.fromstring(svg).itertext()).replace("\xa0", " ")
    assert re.search(r"layers +3,000 +6,000.00", shown)
    assert "k49" not in shown
