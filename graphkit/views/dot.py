"""Graphs as a Graphviz digraph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from graphkit.records import GraphRecord, Node, count_of
from graphkit.views.formatting import plain, us
from graphkit.views.module_tree import Branch, equal_layers, module_tree
from graphkit.views.selection import NamedGraph

_HEAD = """\
  node [shape=box, style="rounded,filled", fillcolor=white, fontname="monospace", fontsize=10];
  graph [style=rounded, color=gray, fontname="monospace", fontsize=10, labeljust=l];"""


def dot_text(graphs: Sequence[NamedGraph]) -> str:
    """Return graphs as dot text: a cluster around each phase, module, and of several graphs each.

    Labels have the measured times. Dashed edges are programmatic (PDL); dotted edges lead from a
    child graph or a conditional to the nodes inside it. Nodes on the critical path have a thick
    border. Of a graph with 500 nodes or more, a layer that is equal to an earlier one is one box.

    Args:
        graphs: At least one. The first one's name is the title.
    """
    lines = [f"digraph {_quoted(graphs[0][0])} {{", _HEAD]
    if len(graphs) == 1:
        lines += _Drawing(graphs[0][1], "").lines("  ")
    else:
        for number, (name, graph) in enumerate(graphs, 1):
            lines += [
                f"  subgraph {_quoted(f'cluster_{number}')} {{",
                f"    label={_quoted(name)};",
            ]
            lines += [*_Drawing(graph, f"g{number}").lines("    "), "  }"]
    return "\n".join([*lines, "}"]) + "\n"


class _Drawing:
    """The statements of one graph.

    Args:
        graph: The graph.
        prefix: Makes its names differ from other graphs' names.
    """

    def __init__(self, graph: GraphRecord, prefix: str) -> None:
        self._graph, self._prefix = graph, prefix
        self._root = module_tree(graph)
        self._equal = equal_layers(self._root)
        self._critical = set(graph.timing.critical_path) if graph.timing else set()
        self._boxes: dict[int, int] = {}  # by each node of a box, the index that names the box

    def lines(self, indent: str) -> Iterator[str]:
        """Yield the statements: first the nodes, then the edges between them."""
        yield from self._branch(self._root, indent)
        yield from (f"{indent}{edge}" for edge in dict.fromkeys(self._edges()))

    def _branch(self, branch: Branch, indent: str) -> Iterator[str]:
        yield from (f"{indent}{self._node(node)}" for node in branch.nodes)
        for child in branch.children:
            if child.path in self._equal:
                yield f"{indent}{self._box(child)}"
                continue
            yield f"{indent}subgraph {_quoted(f'cluster_{self._prefix}{child.path}')} {{"
            yield f"{indent}  label={_label(child.name, child.duration_us, ', ')};"
            yield from self._branch(child, f"{indent}  ")
            yield f"{indent}}}"

    def _box(self, branch: Branch) -> str:
        nodes = branch.all_nodes
        self._boxes |= {node.index: nodes[0].index for node in nodes}
        text = f"{branch.path}: {count_of(len(nodes), 'node')} as in {self._equal[branch.path]}"
        is_critical = any(node.index in self._critical for node in nodes)
        return self._statement(nodes[0].index, text, branch.duration_us, text, is_critical)

    def _node(self, node: Node) -> str:
        is_critical = node.index in self._critical
        return self._statement(
            node.index, node.short_name, node.duration_us, node.name, is_critical
        )

    def _statement(
        self, index: int, text: str, duration: float | None, tooltip: str, is_critical: bool
    ) -> str:
        width = ", penwidth=2" if is_critical else ""
        label = _label(text, duration, "\\n")
        return f"{self._name(index)} [label={label}, tooltip={_quoted(tooltip)}{width}];"

    def _edges(self) -> Iterator[str]:
        targets = {edge.target for edge in self._graph.edges}
        for edge in self._graph.edges:
            style = " [style=dashed]" if edge.kind == "programmatic" else ""
            yield from self._edge(edge.source, edge.target, style)
        for node in self._graph.nodes:
            if node.parent is not None and node.index not in targets:
                yield from self._edge(node.parent, node.index, " [style=dotted]")

    def _edge(self, source: int, target: int, style: str) -> Iterator[str]:
        """Yield an edge, unless it is inside of a box."""
        ends = self._name(source), self._name(target)
        if ends[0] != ends[1] or source == target:
            yield f"{ends[0]} -> {ends[1]}{style};"

    def _name(self, index: int) -> str:
        return f"{self._prefix}n{self._boxes.get(index, index)}"


def _label(text: str, duration: float | None, separator: str) -> str:
    time = "" if duration is None else f"{separator}{us(duration)} us"
    return f'"{_escaped(text)}{time}"'


def _quoted(text: str) -> str:
    return f'"{_escaped(text)}"'


def _escaped(text: str) -> str:
    return plain(text).replace("\\", "\\\\").replace('"', '\\"')
