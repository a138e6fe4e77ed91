"""Pictures of large graphs show the nodes of equal layers once, and lose no time or edge."""

from __future__ import annotations

import re
from xml.etree import ElementTree as ET

import pytest

from graphkit.records import Edge, Environment, GraphRecord, Node
from graphkit.views import FORMATS, Export
from graphkit.views.module_tree import equal_layers, module_tree

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


@pytest.mark.parametrize(
    ("graph", "others"),
    [
        (graph_of(50), range(1, 50)),
        (graph_of(50, other=3), [n for n in range(1, 50) if n != 3]),
        (graph_of(50, other=0), range(2, 50)),
        (graph_of(4), []),
    ],
)
def test_layers_of_large_graphs_are_equal_if_their_kernels_are(graph, others):
    first = "layers.1" if others and others[0] == 2 else "layers.0"
    assert equal_layers(module_tree(graph)) == {f"layers.{n}": first for n in others}


def test_a_picture_of_3000_nodes_keeps_the_count_and_the_time_of_each_layer():
    svg = FORMATS[".svg"](Export(graph_of(60, kernels=50)))
    shown = "".join(ET.fromstring(svg).itertext()).replace("\xa0", " ")
    assert shown.count("k49") == 1
    assert "0.mlp " in shown
    for layer in range(1, 60):
        assert re.search(rf"\b{layer}.mlp, as layers.0 +50 +100.00", shown), layer
