"""One graph as text: what it costs, and its kernels below their modules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from itertools import groupby

from rich.console import Group, RenderableType
from rich.text import Text

from graphkit.records import GraphMemory, GraphRecord, Node, Timing
from graphkit.views.figures import count_of, extent, facts, plain, size, us
from graphkit.views.module_tree import Branch, duration_of, module_tree, shortened
from graphkit.views.tree_lines import Line, TreeLines


def graph_view(graph: GraphRecord, title: str = "") -> RenderableType:
    """Totals, and the tree of modules with their kernels; alike ones in a row on one line."""
    root = module_tree(graph)
    return Group(
        Text(plain(title or graph.name), style="bold"),
        facts([(name, plain(text)) for name, text in _totals(graph, root)]),
        "",
        _tree(root),
    )


def _totals(graph: GraphRecord, root: Branch) -> Iterator[tuple[str, str]]:
    kinds = Counter(node.kind for node in graph.nodes)
    shown = ", ".join(f"{count:,} {kind}" for kind, count in kinds.most_common())
    yield "nodes", f"{len(graph.nodes):,}" + (f": {shown}" if shown else "")
    early = sum(edge.kind == "programmatic" for edge in graph.edges)
    yield "edges", f"{len(graph.edges):,}" + (f", {early:,} of them programmatic" if early else "")
    if graph.captured_at:
        yield "captured at", graph.captured_at
    yield from _timing(graph.timing) if graph.timing else [("replay", "not measured")]
    if root.duration_us is not None:
        yield "all nodes", f"{us(root.duration_us)} us added up"
    if graph.memory is not None:
        yield from _memory(graph.memory)


def _timing(timing: Timing) -> Iterator[tuple[str, str]]:
    whole = timing.busy_us + timing.gap_us
    share = f" ({timing.gap_us / whole:.0%})" if whole > 0 else ""
    yield "replay", f"p50 {us(timing.p50_us)} us, p95 {us(timing.p95_us)} us of {timing.replays}"
    yield "busy", f"{us(timing.busy_us)} us, gaps {us(timing.gap_us)} us{share}"
    yield (
        "critical path",
        f"{us(timing.critical_us)} us, {count_of(len(timing.critical_path), 'node')}",
    )


def _memory(memory: GraphMemory) -> Iterator[tuple[str, str]]:
    yield "memory", f"{size(memory.graph_bytes)} in a pool of {size(memory.pool_bytes)}"
    for segment in memory.segments:
        used = f"{size(segment.used)} of {size(segment.size)} used"
        yield "segment", f"{segment.address:#x}, {segment.pool} pool, {used}"


def _tree(root: Branch) -> TreeLines:
    heads = Line(
        name="module and kernel", depth=0, is_head=False, time="us", share=0.0,
        others=("grid", "block"),
    )  # fmt: skip
    return TreeLines(heads, list(_lines(root, 0, root.duration_us)))


def _lines(branch: Branch, depth: int, whole: float | None) -> Iterator[Line]:
    for item in _in_order(branch):
        if isinstance(item, Branch):
            name, inner = shortened(item)
            yield _line(f"{plain(name)}:", depth, inner.duration_us, whole)
            yield from _lines(inner, depth + 1, whole)
        else:
            yield _line(_label(item), depth, duration_of(item), whole, item[0])


def _line(
    name: str, depth: int, time: float | None, whole: float | None, node: Node | None = None
) -> Line:
    """A line of a module, or of nodes that are like this one."""
    return Line(
        name=name,
        depth=depth,
        is_head=node is None,
        time=us(time),
        share=time / whole if time and whole else 0.0,
        others=(extent(node.grid), extent(node.block)) if node else ("", ""),
    )


def _in_order(branch: Branch) -> Iterator[Branch | list[Node]]:
    """Its modules and its own nodes as they come, alike nodes in a row together."""
    for _, alike in groupby(branch.parts, _likeness):
        first, *others = alike
        if isinstance(first, Branch):
            yield first
        else:
            yield [first, *(node for node in others if isinstance(node, Node))]


def _likeness(item: Branch | Node) -> Hashable:
    if isinstance(item, Branch):
        return item.path
    return item.kind, item.short_name, item.grid, item.block, item.parent


def _label(alike: Sequence[Node]) -> str:
    many = f" x{len(alike)}" if len(alike) > 1 else ""
    inside = "" if alike[0].parent is None else f" (in #{alike[0].parent})"
    return f"{plain(alike[0].short_name)}{many}{inside}"
