"""Graphs as a Graphviz digraph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from graphkit.records import GraphRecord, Node
from graphkit.views.formatting import plain, us
from graphkit.views.module_tree import Branch, module_tree
from graphkit.views.selection import NamedGraph

_HEAD = """\
  node [shape=box, style="rounded,filled", fillcolor=white, fontname="monospace", fontsize=10];
  graph [style=rounded, color=gray, fontname="monospace", fontsize=10, labeljust=l];"""


def dot_of(graphs: Sequence[NamedGraph]) -> str:
    """Return graphs as dot text: a cluster around each module, and around each of several graphs.

    Dashed edges are programmatic (PDL); dotted edges lead from a child graph or a conditional to
    the nodes inside it. Nodes on the critical path have a thick border.

    Args:
        graphs: At least one. The first one's name is the title.
    """
    lines = [f"digraph {_quoted(graphs[0][0])} {{", _HEAD]
    if len(graphs) == 1:
        lines += _graph(graphs[0][1], "", "  ")
    else:
        for number, (name, graph) in enumerate(graphs, 1):
            lines += [
                f"  subgraph {_quoted(f'cluster_{number}')} {{",
                f"    label={_quoted(name)};",
            ]
            lines += [*_graph(graph, f"g{number}", "    "), "  }"]
    return "\n".join([*lines, "}"]) + "\n"


def _graph(graph: GraphRecord, prefix: str, indent: str) -> Iterator[str]:
    """Yield the nodes and edges of a graph; ``prefix`` keeps its names apart from others."""
    critical = set(graph.timing.critical_path) if graph.timing else set()
    yield from _branch(module_tree(graph), critical, prefix, indent)
    yield from (f"{indent}{edge}" for edge in _edges(graph, prefix))


def _branch(branch: Branch, critical: set[int], prefix: str, indent: str) -> Iterator[str]:
    yield from (f"{indent}{_node(node, critical, prefix)}" for node in branch.nodes)
    for child in branch.children:
        yield f"{indent}subgraph {_quoted(f'cluster_{prefix}{child.path}')} {{"
        yield f"{indent}  label={_quoted(child.name)};"
        yield from _branch(child, critical, prefix, f"{indent}  ")
        yield f"{indent}}}"


def _node(node: Node, critical: set[int], prefix: str) -> str:
    time = "" if node.duration_us is None else rf"\n{us(node.duration_us)} us"
    label = f'"{_escaped(node.short_name)}{time}"'
    width = ", penwidth=2" if node.index in critical else ""
    return f"{prefix}n{node.index} [label={label}, tooltip={_quoted(node.name)}{width}];"


def _edges(graph: GraphRecord, prefix: str) -> Iterator[str]:
    name = f"{prefix}n"
    targets = {edge.target for edge in graph.edges}
    for edge in graph.edges:
        style = " [style=dashed]" if edge.kind == "programmatic" else ""
        yield f"{name}{edge.source} -> {name}{edge.target}{style};"
    for node in graph.nodes:
        if node.parent is not None and node.index not in targets:
            yield f"{name}{node.parent} -> {name}{node.index} [style=dotted];"


def _quoted(text: str) -> str:
    return f'"{_escaped(text)}"'


def _escaped(text: str) -> str:
    return plain(text).replace("\\", "\\\\").replace('"', '\\"')
