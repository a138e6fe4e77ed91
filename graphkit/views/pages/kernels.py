"""Page of what each kernel of a graph costs, over all nodes that launch it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from graphkit.records import GraphRecord, Node, count_of
from graphkit.views.formatting import bar, size, us
from graphkit.views.module_tree import any_layer, total_us
from graphkit.views.pages.node import node_row
from graphkit.views.pages.page_model import Column, GraphGroup, Page, Row, count_column

_COLUMNS = (
    Column(name="kernel, modules and nodes", most=64, narrow=40),
    count_column("nodes", 3),
    count_column("us", 1, us),
    replace(count_column("share", 2, "{:.1%}".format), tint="heat"),
    Column(name="bar", show=partial(bar, width=16), rank=5, least=16, draw=bar),
    count_column("mean us", 4, us),
    Column(name="grid", rank=8),
)
_BYTES = (count_column("bytes, at most", 7, size), count_column("GB/s", 6, "{:,.1f}".format))
"""Columns of a record that knows the sizes of tensors; empty where it does not."""
_MOST_GB_PER_S = 20_000.0
"""More than caches and memories of present GPUs deliver: the kernel used a part of the tensors."""
BYTES_NOTE = (
    "Bytes are the sizes of the tensors that the arguments of a kernel point to. They are unknown "
    "where the record has no tensor for a pointer, such as a workspace of cuBLAS. A rate above "
    f"{_MOST_GB_PER_S:,.0f} GB/s is left out, because such a kernel uses a part of its tensors."
)


def kernels_page(group: GraphGroup, index: int) -> Page:
    """Return the kernels of a graph by total time, in each its modules, in these their nodes.

    Modules that differ in the number of their layer only, as ``layers.0.mlp``, share a row. The
    bytes are the sizes of the tensors that the arguments point to, as ``addressed_bytes`` counts:
    a node that reads a part of a tensor counts all of it. GB/s are these bytes per time, and empty
    where no memory is as fast.
    """
    graph = group.graphs[index][1]
    costs = _Costs(graph.nodes)
    by_kernel = _groups(graph.nodes, lambda node: (node.kind, node.short_name))
    return group.page(
        index,
        kernels_page,
        key="kernels",
        crumb="kernels",
        facts=(
            ("kernels", f"{len(by_kernel):,}, in {count_of(len(graph.nodes), 'node')}"),
            ("sum of nodes", "not measured" if costs.whole is None else f"{us(costs.whole)} us"),
        ),
        columns=costs.columns,
        notes=(BYTES_NOTE,) if costs.has_bytes else (),
        rows=tuple(_kernel(graph, nodes, costs) for nodes in by_kernel),
        empty="this graph has no nodes",
    )


def _kernel(graph: GraphRecord, nodes: Sequence[Node], costs: _Costs) -> Row:
    first = nodes[0]
    modules = _groups(nodes, lambda node: any_layer(node.module))
    return Row(
        key=f"{first.kind} {first.short_name}",
        values=costs.values(first.short_name, nodes),
        note=first.name,
        make_children=lambda: _modules(graph, modules, costs),
        nodes=nodes,
    )


def _modules(graph: GraphRecord, modules: Iterable[Sequence[Node]], costs: _Costs) -> Iterator[Row]:
    for nodes in modules:
        name = any_layer(nodes[0].module) or "no module"
        paths = len({node.module for node in nodes})
        yield Row(
            key=f"{nodes[0].kind} {nodes[0].short_name} {name}",
            values=costs.values(f"{name} ({paths} x)" if paths > 1 else name, nodes),
            note=f"{name}, {count_of(paths, 'module')}",
            make_children=partial(_nodes, graph, nodes, costs),
            is_run=True,
            nodes=nodes,
        )


def _nodes(graph: GraphRecord, nodes: Iterable[Node], costs: _Costs) -> Iterator[Row]:
    return (node_row(graph, node, costs.values(f"#{node.index}", [node])) for node in nodes)


class _Costs:
    """Columns of a graph's page, and the values of rows in them."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.whole = total_us(nodes)
        self.has_bytes = any(addressed_bytes([node]) is not None for node in nodes)
        self.columns = (*_COLUMNS, *_BYTES) if self.has_bytes else _COLUMNS

    def values(self, name: str, nodes: Sequence[Node]) -> tuple[object, ...]:
        duration, whole = total_us(nodes), self.whole
        measured = sum(node.duration_us is not None for node in nodes)
        share = duration / whole if duration is not None and whole else None
        mean = duration / measured if duration is not None and measured else None
        grids = {node.grid for node in nodes}
        grid = "x".join(map(str, next(iter(grids)))) if len(grids) == 1 else f"{len(grids)} grids"
        moved = addressed_bytes(nodes)
        rate = moved / duration / 1000 if moved and duration and measured == len(nodes) else None
        rate = None if rate is None or rate > _MOST_GB_PER_S else rate
        values = name, len(nodes), duration, share, share, mean, grid or None, moved, rate
        return values[: len(self.columns)]


def _groups(nodes: Iterable[Node], key: Callable[[Node], Hashable]) -> list[list[Node]]:
    """Return the nodes by key, the groups of most time first, then the largest."""
    groups: dict[Hashable, list[Node]] = {}
    for node in nodes:
        groups.setdefault(key(node), []).append(node)
    return sorted(groups.values(), key=lambda group: (-(total_us(group) or 0.0), -len(group)))


def addressed_bytes(nodes: Sequence[Node]) -> int | None:
    """Return the bytes of all tensors that the nodes' arguments point to, summed over the nodes.

    A node may read a part of a tensor, such as some rows of an embedding or of a KV pool, so this
    is an upper bound of the distinct bytes that it reads and writes. Within a node, bytes that
    several arguments point to count once, even if the node reads and writes them.

    ``None`` if a node has no pointers, or if the size behind one of them is not in the record.
    """
    by_node = [_node_bytes(node) for node in nodes]
    known = [num_bytes for num_bytes in by_node if num_bytes is not None]
    return sum(known) if known and len(known) == len(by_node) else None


def _node_bytes(node: Node) -> int | None:
    pointers = [pointer for argument in node.arguments for pointer in argument.pointers]
    if not all(pointer.size for pointer in pointers):
        return None
    end = total = 0
    for begin, length in sorted((pointer.address, pointer.size) for pointer in pointers):
        total += max(0, begin + length - max(begin, end))
        end = max(end, begin + length)
    return total or None
