"""A graph as a Graphviz digraph."""

from __future__ import annotations

from collections.abc import Iterator

from graphkit.records import GraphRecord, Node
from graphkit.views.formatting import plain, us
from graphkit.views.module_tree import Branch, module_tree

_HEAD = """\
  node [shape=box, style="rounded,filled", fillcolor=white, fontname="monospace", fontsize=10];
  graph [style=rounded, color=gray, fontname="monospace", fontsize=10, labeljust=l];"""


def dot_of(graph: GraphRecord, title: str = "") -> str:
    """Return the graph as dot text, a cluster around each module.

    Dashed edges are programmatic (PDL); dotted edges lead from a child graph or a conditional to
    the nodes inside it. Nodes on the critical path have a thick border.
    """
    critical = set(graph.timing.critical_path) if graph.timing else set()
    lines = [
        f"digraph {_quoted(title or graph.name)} {{",
        _HEAD,
        *_branch(module_tree(graph), critical, "  "),
        *_edges(graph),
        "}",
    ]
    return "\n".join(lines) + "\n"


def _branch(branch: Branch, critical: set[int], indent: str) -> Iterator[str]:
    yield from (f"{indent}{_node(node, critical)}" for node in branch.nodes)
    for child in branch.children:
        yield f"{indent}subgraph {_quoted(f'cluster_{child.path}')} {{"
        yield f"{indent}  label={_quoted(child.name)};"
        yield from _branch(child, critical, f"{indent}  ")
        yield f"{indent}}}"


def _node(node: Node, critical: set[int]) -> str:
    time = "" if node.duration_us is None else rf"\n{us(node.duration_us)} us"
    label = f'"{_escaped(node.short_name)}{time}"'
    width = ", penwidth=2" if node.index in critical else ""
    return f"n{node.index} [label={label}, tooltip={_quoted(node.name)}{width}];"


def _edges(graph: GraphRecord) -> Iterator[str]:
    known = {node.index for node in graph.nodes}
    targets = {edge.target for edge in graph.edges}
    for edge in graph.edges:
        if {edge.source, edge.target} <= known:
            style = " [style=dashed]" if edge.kind == "programmatic" else ""
            yield f"  n{edge.source} -> n{edge.target}{style};"
    for node in graph.nodes:
        if node.parent in known and node.index not in targets:
            yield f"  n{node.parent} -> n{node.index} [style=dotted];"


def _quoted(text: str) -> str:
    return f'"{_escaped(text)}"'


def _escaped(text: str) -> str:
    return plain(text).replace("\\", "\\\\").replace('"', '\\"')
