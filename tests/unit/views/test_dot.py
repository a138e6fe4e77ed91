"""Valid dot text for any names."""

from __future__ import annotations

import dataclasses
import re

import pytest

from graphkit.records import Edge
from graphkit.views.dot import dot_of

STRING = r'"(?:[^"\\\n]|\\.)*"'
ATTRIBUTE = rf"\w+=(?:{STRING}|[\w.]+)"
STATEMENT = re.compile(
    rf"\s*(?:digraph {STRING} \{{|subgraph {STRING} \{{|\}}|label={STRING};|"
    rf"(?:node|graph|n\d+|n\d+ -> n\d+)(?: \[{ATTRIBUTE}(?:, {ATTRIBUTE})*\])?;)"
)


def check(dot):
    """Every line is one statement of the grammar, and braces are balanced."""
    depth = 0
    for line in dot.splitlines():
        assert STATEMENT.fullmatch(line), line
        depth += line.endswith("{") - (line.strip() == "}")
        assert depth >= 0
    assert depth == 0


def test_it_reads_as_stored(graph, golden):
    dot = dot_of(graph)
    check(dot)
    golden("graph.dot.txt", dot)


def test_it_is_the_same_from_run_to_run(graph):
    assert dot_of(graph) == dot_of(dataclasses.replace(graph))


def test_every_node_and_edge_is_there_once(graph):
    dot = dot_of(graph)
    assert re.findall(r"n(\d+) \[label", dot) != []
    assert sorted(map(int, re.findall(r"n(\d+) \[label", dot))) == list(range(len(graph.nodes)))
    drawn = [tuple(map(int, pair)) for pair in re.findall(r"n(\d+) -> n(\d+)", dot)]
    assert drawn == [*((e.source, e.target) for e in graph.edges), (18, 19)]


def test_programmatic_edges_are_dashed_and_no_others(graph):
    dashed = re.findall(r"n(\d+) -> n(\d+) \[style=dashed\]", dot_of(graph))
    early = [edge for edge in graph.edges if edge.kind == "programmatic"]
    assert dashed == [(str(edge.source), str(edge.target)) for edge in early] != []


def test_a_node_is_in_the_clusters_of_its_modules(graph):
    around, lies_in = [], {}
    for line in dot_of(graph).splitlines()[1:-1]:
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
    dot = dot_of(dataclasses.replace(graph, name=name, nodes=nodes, edges=()))
    check(dot)
    assert dot.count("[label=") == 3


def test_edges_to_missing_nodes_are_left_out(graph):
    dot = dot_of(dataclasses.replace(graph, edges=(Edge(source=0, target=99),)))
    assert "n99" not in dot
