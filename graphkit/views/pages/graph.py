"""The view of one graph: the modules whose forwards made its nodes, and what they cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from graphkit.records import GraphRecord, Node
from graphkit.views.figures import bar, count_of, extent, size, us
from graphkit.views.module_tree import Branch, module_tree, shortened
from graphkit.views.pages.buffers import buffers_link
from graphkit.views.pages.compare import compare_link
from graphkit.views.pages.family import Family
from graphkit.views.pages.memory import memory_link
from graphkit.views.pages.node import node_of_index
from graphkit.views.pages.page import Beside, Column, Item, Page

_bar = partial(bar, width=8)
_ROWS = 16
"""What a terminal of 24 lines has room for."""


def graph_page(family: Family, at: int) -> Page:
    """The tree of a graph; Tab goes through the family."""
    title, graph = family.graphs[at]
    tree = _Tree(graph)
    items = tuple(tree.items(tree.root))
    return Page(
        title=title,
        facts=tuple(_facts(graph)),
        columns=(Column(name="module and node", least=40), *(fact.column for fact in tree.facts)),
        items=items,
        opened=frozenset(_unfolded(items)),
        links={
            "buffers": buffers_link(family.modes, graph.mode),
            "compare": compare_link(family.graphs, at),
            "memory": memory_link(family.graphs, at),
        },
        beside=Beside(count=len(family.graphs), at=at, make=partial(graph_page, family)),
        empty="this graph has no nodes",
    )


def _unfolded(items: Sequence[Item]) -> Iterator[str]:
    """Keys of the modules that are open at first: level by level, while all rows can be seen."""
    rows, level = len(items), list(items)
    while level:
        modules, level = level, [child for item in level for child in item.children]
        rows += len(level)
        if rows > _ROWS:
            return
        yield from (item.key for item in modules if item.inside)


def _facts(graph: GraphRecord) -> Iterator[str]:
    yield count_of(len(graph.nodes), "node" if graph.backend == "cuda" else "operation")
    if graph.timing:
        yield f"replay p50 {us(graph.timing.p50_us)} us, p95 {us(graph.timing.p95_us)} us"
        yield f"busy {us(graph.timing.busy_us)} us, gaps {us(graph.timing.gap_us)} us"
    else:
        yield "replay not measured"
    if graph.memory:
        yield f"{size(graph.memory.graph_bytes)} in a pool of {size(graph.memory.pool_bytes)}"
    if graph.captured_at:
        yield f"captured at {graph.captured_at}"


class _Fact(NamedTuple):
    """A column, and where its values come from."""

    column: Column
    of_node: Callable[[Node], Any]
    of_module: Callable[[Branch], Any] = lambda _branch: None


class _Tree:
    """Makes the items of modules and nodes as they are asked for."""

    def __init__(self, graph: GraphRecord) -> None:
        self.root, self._graph = module_tree(graph), graph
        programmatic = (edge.target for edge in graph.edges if edge.kind == "programmatic")
        self._early = frozenset(programmatic)
        self.facts = tuple(self._columns())

    def items(self, branch: Branch) -> Iterator[Item]:
        """What is in a module, in order of creation."""
        for part in branch.parts:
            yield self._node(part) if isinstance(part, Node) else self._module(part)

    def _columns(self) -> Iterator[_Fact]:
        """Those that something in the graph has a value for."""
        yield _Fact(_number("nodes", 3), lambda _: 1, lambda module: module.num_nodes)
        if self.root.duration_us is not None:
            yield _Fact(_number("us", 1, us), lambda n: n.duration_us, lambda m: m.duration_us)
            yield _Fact(_number("share", 2, "{:.1%}".format), self._part, self._part)
            yield _Fact(Column(name="bar", show=_bar, rank=4), self._part, self._part)
        yield _Fact(Column(name="kind", rank=5), lambda node: node.kind, lambda _: "module")
        if any(node.grid for node in self._graph.nodes):
            yield _Fact(Column(name="grid", show=extent, rank=6), lambda n: n.grid or None)
            yield _Fact(Column(name="block", show=extent, rank=7), lambda n: n.block or None)
            yield _Fact(_number("shared", 8, size), lambda n: n.shared_memory_bytes or None)
            yield _Fact(_number("pdl", 9), lambda n: self._num_early([n]), self._num_early_in)
        yield _Fact(Column(name="source", rank=10, most=40), lambda node: node.source or None)

    def _module(self, branch: Branch) -> Item:
        name, branch = shortened(branch)
        return Item(
            key=branch.path,
            values=(name, *(fact.of_module(branch) for fact in self.facts)),
            note=branch.path,
            inside=partial(self.items, branch),
        )

    def _node(self, node: Node) -> Item:
        op = node.op if node.op != node.name else ""
        note = (f"#{node.index}", node.module, op, node.source, node.name)  # the endless one last
        return Item(
            key=f"#{node.index}",
            values=(node.short_name, *(fact.of_node(node) for fact in self.facts)),
            note=" · ".join(filter(None, note)),
            links={"open": partial(node_of_index, self._graph, node.index)},
        )

    def _part(self, part: Branch | Node) -> float | None:
        time, whole = part.duration_us, self.root.duration_us
        return time / whole if time is not None and whole else None

    def _num_early_in(self, branch: Branch) -> int | None:
        return self._num_early(branch.all_nodes)

    def _num_early(self, nodes: Sequence[Node]) -> int | None:
        """How many may begin before the node ahead of them ends; ``None`` for none."""
        return sum(node.index in self._early for node in nodes) or None


def _number(name: str, rank: int, show: Callable[[Any], str] = "{:,}".format) -> Column:
    return Column(name=name, show=show, is_number=True, rank=rank)
