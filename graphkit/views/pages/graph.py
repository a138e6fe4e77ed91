"""Page of one graph: the modules whose forward made its nodes, and what the nodes cost.

In a whole step, the modules are inside of its phases.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby

from graphkit.records import GraphRecord, Node, extent
from graphkit.views.formatting import bar, graph_facts, size, us
from graphkit.views.module_tree import (
    Branch,
    module_tree,
    node_parts,
    node_phases,
    shortened,
    source_cell,
    total_us,
)
from graphkit.views.pages.node import node_row
from graphkit.views.pages.page_model import Column, GraphGroup, Page, Row, count_column

_OPEN_ROWS = 16
"""Rows that a terminal of 24 lines shows."""
_ALWAYS, _MEASURED, _LAUNCHED, _IN_PARTS = range(4)
_COLUMNS = (
    (_ALWAYS, Column(name="module and node", least=40, narrow=34)),
    (_ALWAYS, count_column("nodes", 4)),
    (_MEASURED, count_column("us", 1, us)),
    (_MEASURED, replace(count_column("share", 2, "{:.1%}".format), tint="heat")),
    (_MEASURED, Column(name="bar", show=partial(bar, width=8), rank=5, draw=bar, tint="part")),
    (_IN_PARTS, Column(name="part", rank=6, most=8, tint="part")),
    (_ALWAYS, Column(name="kind", rank=8)),
    (_LAUNCHED, Column(name="grid", show=extent, rank=6)),
    (_LAUNCHED, Column(name="block", show=extent, rank=7)),
    (_LAUNCHED, count_column("shared", 9, size)),
    (_LAUNCHED, count_column("pdl", 10)),
    (_ALWAYS, Column(name="source", rank=3, most=40, sums_up=True)),
)


def graph_page(group: GraphGroup, index: int) -> Page:
    """Return the tree of modules and nodes of one of the group's graphs."""
    title, graph = group.graphs[index]
    is_of_runner = title == f"{graph.mode} {graph.batch_size}"
    tree = _Tree(graph)
    rows = tuple(tree.rows(tree.root))
    return group.page(
        index,
        graph_page,
        crumb=f"{graph.mode} > size {graph.batch_size}" if is_of_runner else title,
        facts=tuple(graph_facts(graph)),
        columns=tree.columns,
        rows=rows,
        opened=frozenset(_opened(rows)),
        empty="this graph has no nodes",
    )


def _opened(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the keys of the modules to open at first: level by level while all rows fit."""
    count, level = len(rows), list(rows)
    while level:
        parents = [row for row in level if row.make_children and not row.is_run]
        level = [child for row in parents for child in row.children]
        count += len(level)
        if count > _OPEN_ROWS:
            return
        yield from (row.key for row in parents)


class _Tree:
    """Makes the rows of modules and nodes when they are needed."""

    def __init__(self, graph: GraphRecord) -> None:
        self.root, self._graph = module_tree(graph), graph
        self._phases, self._parts = frozenset(node_phases(graph)), node_parts(graph)
        programmatic = (edge.target for edge in graph.edges if edge.kind == "programmatic")
        self._programmatic = frozenset(programmatic)
        needs = {_ALWAYS}
        if self.root.duration_us is not None:
            needs.add(_MEASURED)
        if any(node.grid for node in graph.nodes):
            needs.add(_LAUNCHED)
        if any(self._parts.values()):
            needs.add(_IN_PARTS)
        self._is_used = [need in needs for need, _ in _COLUMNS]
        self.columns = tuple(column for need, column in _COLUMNS if need in needs)

    def rows(self, branch: Branch) -> Iterator[Row]:
        """Yield the modules and nodes in a module, in order of creation, equal nodes as a run."""
        for _, run in groupby(branch.parts, _likeness):
            first, *others = run
            if isinstance(first, Branch):
                yield self._module(first)
            elif others:
                yield self._run([first, *(node for node in others if isinstance(node, Node))])
            else:
                yield self._node(first)

    def _module(self, branch: Branch) -> Row:
        is_phase = branch.path in self._phases
        name, inner = (branch.name, branch) if is_phase else shortened(branch)
        kind = "phase" if is_phase else "module"
        return Row(
            key=inner.path,
            values=self._values(name, inner.all_nodes, inner.duration_us, None, kind),
            note=inner.path,
            make_children=partial(self.rows, inner),
            nodes=inner.all_nodes,
            part=self._part(inner.all_nodes),
        )

    def _run(self, nodes: Sequence[Node]) -> Row:
        first, last = nodes[0], nodes[-1]
        return Row(
            key=f"#{first.index} x{len(nodes)}",
            values=self._values(f"{_name(first)} x{len(nodes)}", nodes, total_us(nodes), first),
            note=f"{len(nodes)} equal nodes, #{first.index} to #{last.index}",
            make_children=lambda: map(self._node, nodes),
            is_run=True,
            nodes=nodes,
            part=self._part(nodes),
        )

    def _node(self, node: Node) -> Row:
        values = self._values(_name(node), [node], node.duration_us, node)
        return node_row(self._graph, node, values, self._parts[node.index])

    def _part(self, nodes: Iterable[Node]) -> str:
        parts = {self._parts[node.index] for node in nodes}
        return parts.pop() if len(parts) == 1 else ""

    def _values(
        self,
        name: str,
        nodes: Sequence[Node],
        duration: float | None,
        launch: Node | None,
        kind: str = "",
    ) -> tuple[object, ...]:
        """Return the values of nodes in the used columns; ``launch`` is any of equal nodes."""
        whole = self.root.duration_us
        share = duration / whole if duration is not None and whole else None
        programmatic = sum(node.index in self._programmatic for node in nodes)
        kind, grid, block, shared = (
            (launch.kind, launch.grid, launch.block, launch.shared_memory_bytes)
            if launch
            else (kind, (), (), 0)
        )
        values = (
            name, len(nodes), duration, share, share, self._part(nodes) or None, kind,
            grid or None, block or None, shared or None, programmatic or None,
            source_cell(nodes) or None,
        )  # fmt: skip
        return tuple(v for v, used in zip(values, self._is_used, strict=True) if used)


def _name(node: Node) -> str:
    return node.short_name if node.parent is None else f"{node.short_name} (in #{node.parent})"


def _likeness(part: Branch | Node) -> Hashable:
    if isinstance(part, Branch):
        return part.path
    return part.kind, part.short_name, part.grid, part.block, part.parent
