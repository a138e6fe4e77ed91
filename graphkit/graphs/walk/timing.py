"""Times of a graph's nodes, from profiled replays, and the path that takes longest.

The profiler does not report nodes. But all work of one launch has one correlation id, and in a
graph without branches work starts in the order of the nodes, with those of a child graph in its
place. (Disabling nodes to measure the difference does not work: neighbouring nodes overlap.)

A kernel with a programmatic edge starts early and waits for the kernel before it. Its time counts
from the end of that kernel; otherwise a chain of such kernels would count the same time repeatedly.

Child graphs and conditional nodes contain nodes; ``Node.parent`` names the node around them.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from graphlib import TopologicalSorter
from itertools import chain, pairwise
from statistics import median, quantiles
from typing import Any

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]  # not in its __all__
from torch.profiler import ProfilerActivity, profile

from graphkit.records import Edge, Node, Timing


def execution_order(nodes: Sequence[Node]) -> Iterator[Node]:
    """Yield each node in order of creation, followed by the nodes that it contains."""
    children = _children(nodes)

    def below(parent: int | None) -> Iterator[Node]:
        for node in children[parent]:
            yield node
            yield from below(node.index)

    return below(None)


def critical_path(nodes: Sequence[Node], edges: Sequence[Edge]) -> tuple[int, ...]:
    """Return the indices of the nodes on the path through the edges that takes longest.

    Below a node that contains others, the path leads through the contained nodes before it reaches
    the next node. A node without a duration counts as 0. The edges form no cycle.
    """
    predecessors = _predecessors(nodes, edges)
    end_us: dict[int, float] = {}  # of the longest path that ends at the node
    came_from: dict[int, int | None] = {}
    order = TopologicalSorter({node.index: predecessors[node.index] for node in nodes})
    for index in order.static_order():
        last = max(predecessors[index], key=lambda i: end_us[i], default=None)
        came_from[index] = last
        start_us = 0.0 if last is None else end_us[last]
        end_us[index] = start_us + (nodes[index].duration_us or 0.0)
    node: int | None = max(end_us, key=lambda i: end_us[i], default=None)
    path = []
    while node is not None:
        path.append(node)
        node = came_from[node]
    return tuple(reversed(path))


def _predecessors(nodes: Sequence[Node], edges: Sequence[Edge]) -> Mapping[int, Sequence[int]]:
    """Return the nodes that each node waits for, by index.

    The first nodes inside a node wait for that node. What follows the node waits for the last nodes
    inside it.
    """
    children, sources = _children(nodes), {edge.source for edge in edges}

    def last_inside(index: int) -> list[int]:
        inner = [node.index for node in children[index] if node.index not in sources]
        return list(chain.from_iterable(map(last_inside, inner))) or [index]

    predecessors: dict[int, list[int]] = defaultdict(list)
    for edge in edges:
        predecessors[edge.target] += last_inside(edge.source)
    for node in nodes:
        if node.parent is not None and not predecessors[node.index]:
            predecessors[node.index] = [node.parent]
    return predecessors


def _children(nodes: Sequence[Node]) -> Mapping[int | None, Sequence[Node]]:
    """Return nodes by the index of the node that contains them; ``None`` for the graph itself."""
    children: dict[int | None, list[Node]] = defaultdict(list)
    for node in nodes:
        children[node.parent].append(node)
    return children


_TIMED_KINDS = ("kernel", "memcpy", "memset", "op")
REPLAYS, UNPROFILED_REPLAYS = 20, 10
"""Replays of a CUDA graph that are measured with and without the profiler."""


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of work that the device ran.

    Attributes:
        name: The kernel's name, or the profiler's name of a copy or fill.
        grid: The kernel's grid; empty if the profiler does not give it.
        start, duration: In nanoseconds.
    """

    name: str
    grid: tuple[int, ...]
    start: int
    duration: int

    @property
    def end(self) -> int:
        """End, in nanoseconds."""
        return self.start + self.duration

    def after(self, time: int) -> Span:
        """Return the part of the span that is not before a time, in nanoseconds."""
        start = min(max(self.start, time), self.end)
        return replace(self, start=start, duration=self.end - start)


def with_times(
    nodes: Sequence[Node], edges: Sequence[Edge], launches: Sequence[Sequence[Span]]
) -> tuple[tuple[Node, ...], Timing | None]:
    """Assign the spans of replays, by start, to nodes.

    Replays with another number of spans than the graph has timed nodes are ignored.

    Returns:
        The nodes with median times over the replays, and the times of the whole graph. If no
        replay is left, the nodes unchanged and ``None``.
    """
    expected = [node for node in execution_order(nodes) if node.kind in _TIMED_KINDS]
    launches = [launch for launch in launches if len(launch) == len(expected)]
    if not expected or not launches:
        return tuple(nodes), None
    by_order = all(_is_in_order(expected, launch) for launch in launches)
    waits: dict[int, list[int]] = defaultdict(list)
    for edge in edges:
        if edge.kind == "programmatic":
            waits[edge.target].append(edge.source)
    spans: dict[int, list[Span]] = defaultdict(list)
    for launch in launches:
        matched = launch if by_order else _matched(expected, launch)
        indices = (node.index for node in expected)
        by_node = {index: span for index, span in zip(indices, matched, strict=True) if span}
        for index, span in by_node.items():
            ends = (by_node[source].end for source in waits[index] if source in by_node)
            at_work = span.after(max(ends, default=span.start))
            spans[index].append(replace(at_work, start=at_work.start - launch[0].start))
    timed = tuple(_node_with_times(node, spans.get(node.index, ())) for node in nodes)
    return timed, _graph_timing(timed, edges, launches, "order" if by_order else "name and grid")


def unprofiled_us(replay: Callable[[], object]) -> float:
    """Return the median time on the device of a replay without a profiler, in us.

    The replays follow each other, so that the host enqueues each one while the device is busy with
    the one before. If that takes the host longer than the device takes for a replay, the result is
    the time of the host. Call this before the first profiler of the process starts: afterwards all
    launches take longer.

    Args:
        replay: Replays once on the current stream; called ``UNPROFILED_REPLAYS`` + 1 times.
    """
    replay()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(UNPROFILED_REPLAYS + 1)]
    events[0].record()
    for event in events[1:]:
        replay()
        event.record()
    events[-1].synchronize()
    times_ms: list[float] = [begin.elapsed_time(end) for begin, end in pairwise(events)]
    return median(times_ms) * 1e3


def profile_launches(replay: Callable[[], object]) -> list[list[Span]]:
    """Profile replays of a graph, and return the spans of each one, by start."""
    replay()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        for _ in range(REPLAYS):
            replay()
            torch.cuda.synchronize()
    launches: dict[int, list[Span]] = defaultdict(list)
    for event in profiler.profiler.kineto_results.events():
        if event.device_type() == DeviceType.CUDA and event.duration_ns() > 0:
            span = Span(event.name(), _launch_grid(event), event.start_ns(), event.duration_ns())
            launches[event.correlation_id()].append(span)
    by_start = [sorted(spans, key=lambda span: span.start) for spans in launches.values()]
    return sorted(by_start, key=lambda launch: launch[0].start)


def _launch_grid(event: Any) -> tuple[int, ...]:
    try:
        metadata: Mapping[str, Any] = json.loads("{" + event.metadata_json() + "}")
    except (AttributeError, ValueError):
        return ()
    return tuple(metadata.get("grid", ()))


def _is_in_order(nodes: Sequence[Node], launch: Sequence[Span]) -> bool:
    return all(_agree(node, span) for node, span in zip(nodes, launch, strict=True))


def _agree(node: Node, span: Span) -> bool:
    if node.kind in ("memcpy", "memset"):
        return span.name.lower().startswith(node.kind)
    return span.name == node.name and span.grid in ((), node.grid)


def _matched(nodes: Sequence[Node], launch: Sequence[Span]) -> list[Span | None]:
    """Return the span of each node: the first unused one that agrees; ``None`` without one."""
    unused: dict[str, list[Span]] = defaultdict(list)
    for span in launch:
        unused[_match_key(span.name)].append(span)
    matches: list[Span | None] = []
    for node in nodes:
        candidates = unused[_match_key(node.name)]
        match = next((span for span in candidates if _agree(node, span)), None)
        if match is not None:
            candidates.remove(match)
        matches.append(match)
    return matches


def _match_key(name: str) -> str:
    """Return a kernel's name; for copies and fills ``memcpy`` or ``memset``."""
    kind = name.split(" ")[0].lower()
    return kind if kind in ("memcpy", "memset") else name


def _node_with_times(node: Node, spans: Sequence[Span]) -> Node:
    if not spans:
        return node
    return replace(
        node,
        duration_us=median(span.duration for span in spans) / 1e3,
        start_us=median(span.start for span in spans) / 1e3,
    )


def _graph_timing(
    nodes: Sequence[Node], edges: Sequence[Edge], launches: Sequence[Sequence[Span]], bound_by: str
) -> Timing:
    durations = sorted(_duration(launch) for launch in launches)
    p95 = float(durations[0])
    if len(durations) > 1:  # quantiles() needs two values
        p95 = quantiles(durations, n=20, method="inclusive")[-1]
    path = critical_path(nodes, edges)
    return Timing(
        replays=len(launches),
        p50_us=durations[(len(durations) - 1) // 2] / 1e3,
        p95_us=p95 / 1e3,
        critical_path=path,
        critical_us=sum(nodes[index].duration_us or 0.0 for index in path),
        bound_by=bound_by,
    )


def _duration(launch: Sequence[Span]) -> int:
    return max(span.end for span in launch) - launch[0].start
