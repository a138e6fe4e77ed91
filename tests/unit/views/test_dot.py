"""Valid dot text for any names and any number of graphs."""

from __future__ import annotations

import dataclasses
import re

import pytest

from graphkit.views.dot import dot_text
from graphkit.views.selection import named_graphs

STRING = r'"(?:[^"\\\n]|\\.)*"'
ATTRIBUTE = rf"\w+=(?:{STRING}|[\w.]+)"
NODE = r"(?:g\d+)?n\d+"
STATEMENT = re.compile(
    rf"\s*(?:digraph {STRING} \{{|subgraph {STRING} \{{|\}}|label={STRING};|"
    rf"(?:node|graph|{NODE}|{NODE} -> {NODE})(?: \[{ATTRIBUTE}(?:, {ATTRIBUTE})*\])?;)"
)


def drawn(graph):
    return dot_text(named_graphs(graph))


def check(dot):
    """Every line is one statement of the grammar, and braces are balanced."""
    depth = 0
    for line in dot.splitlines():
        assert STATEMENT.fullmatch(line), line
        depth += line.endswith("{") - (line.strip() == "}")
        assert depth >= 0
    assert depth == 0


def test_it_reads_as_stored(graph, golden):
    dot = drawn(graph)
    check(dot)
    golden("graph.dot.txt", dot)


def test_it_is_the_same_from_run_to_run(graph):
    assert drawn(graph) == drawn(dataclasses.replace(graph))


def test_every_node_and_edge_is_there_once(graph):
    dot = drawn(graph)
    assert re.findall(r"n(\d+) \[label", dot) != []
    assert sorted(map(int, re.findall(r"n(\d+) \[label", dot))) == list(range(len(graph.nodes)))
    pairs = [tuple(map(int, pair)) for pair in re.findall(r"n(\d+) -> n(\d+)", dot)]
    assert pairs == [*((e.source, e.target) for e in graph.edges), (18, 19)]


def test_programmatic_edges_are_dashed_and_no_others(graph):
    dashed = re.findall(r"n(\d+) -> n(\d+) \[style=dashed\]", drawn(graph))
    early = [edge for edge in graph.edges if edge.kind == "programmatic"]
    assert dashed == [(str(edge.source), str(edge.target)) for edge in early] != []


def test_a_node_is_in_the_clusters_of_its_modules(graph):
    around, lies_in = [], {}
    for line in drawn(graph).splitlines()[1:-1]:
        if opened := re.search(r'subgraph "cluster_(.*)" \{', line):
            around.append(opened[1])
        elif line.strip() == "}":
            around.pop()
        elif node := re.search(r"n(\d+) \[label", line):
            lies_in[int(node[1])] = around[-1] if around else ""
    assert lies_in == {node.index: node.module for node in graph.nodes}


@pytest.mark.parametrize(
    "name", ['a"b', "a\\", 'a\\"; x -> y; "', "a\nb", "<b>", "日本", "{|}", "\x00"]
)
def test_any_name_is_one_string(graph, name):
    nodes = tuple(
        dataclasses.replace(node, short_name=name, name=name, module=f"m.{name}")
        for node in graph.nodes[:3]
    )
    dot = drawn(dataclasses.replace(graph, name=name, nodes=nodes, edges=()))
    check(dot)
    assert dot.count("[label=") == 3


def test_several_graphs_are_clusters_with_names_of_their_own(capture):
    dot = dot_text(named_graphs(capture))
    check(dot)
    clusters = re.findall(r'^  subgraph "cluster_(\d)" \{\n    label="(.*)";$', dot, re.MULTILINE)
    assert clusters == [(str(i), name) for i, (name, _) in enumerate(named_graphs(capture), 1)]
    names = re.findall(r"(g\d+n\d+) \[label", dot)
    assert len(names) == len(set(names)) == sum(len(graph.nodes) for graph in capture.graphs)
    pairs = re.findall(r"(g\d+)n\d+ -> (g\d+)n\d+", dot)
    assert all(source == target for source, target in pairs)
    assert len(pairs) == sum(len(graph.edges) + 1 for graph in capture.graphs)
    modules = re.findall(r'subgraph "(cluster_g.*)" \{', dot)
    assert len(modules) == len(set(modules))
