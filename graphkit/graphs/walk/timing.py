"""What each node of a graph costs: the profiler's times of a few replays, bound to the nodes.

The profiler knows no nodes. But all that one launch runs shares a correlation id, and in a graph
without branches the order of starts is the order of the nodes, those of a child graph in its place.
(Switching nodes off to see what is saved is no way to measure: neighbours overlap.)
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from statistics import median, quantiles
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from graphkit.graphs.walk.node_order import critical_path, execution_order
from graphkit.records import Edge, Node, Timing

_TIMED = ("kernel", "memcpy", "memset", "op")
REPLAYS = 20


@dataclass(frozen=True, slots=True)
class Span:
    """One thing that the device did; times in nanoseconds."""

    name: str
    grid: tuple[int, ...]
    start: int
    duration: int

    @property
    def end(self) -> int:
        """When it was over."""
        return self.start + self.duration


def timed(
    nodes: Sequence[Node], edges: Sequence[Edge], launches: Sequence[Sequence[Span]]
) -> tuple[tuple[Node, ...], Timing | None]:
    """Bind what was measured to nodes.

    Args:
        nodes: The graph's.
        edges: Between them.
        launches: What ran in each replay, by start; those that ran another number of things than
            the graph has are left out.

    Returns:
        The nodes with their times, and the whole; the nodes as they were and ``None`` if there is
        no launch of the graph.
    """
    expected = [node for node in execution_order(nodes) if node.kind in _TIMED]
    launches = [each for each in launches if len(each) == len(expected)]
    if not expected or not launches:
        return tuple(nodes), None
    by_order = all(_is_in_order(expected, launch) for launch in launches)
    spans: dict[int, list[Span]] = defaultdict(list)
    for launch in launches:
        found = launch if by_order else _matched(expected, launch)
        for node, each in zip(expected, found, strict=True):
            if each is not None:
                spans[node.index].append(replace(each, start=each.start - launch[0].start))
    made = tuple(_with_times(node, spans.get(node.index, ())) for node in nodes)
    return made, _whole(made, edges, launches, "order" if by_order else "name and grid")


def launches_of(replay: Callable[[], object], parts: int = 1) -> list[list[Span]]:
    """What the device did in each of some replays, by start.

    Args:
        replay: Launches a graph once.
        parts: Graphs that one replay launches, one after the other.
    """
    replay()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
        for _ in range(REPLAYS):
            replay()
            torch.cuda.synchronize()
    launches: dict[int, list[Span]] = defaultdict(list)
    for event in seen.profiler.kineto_results.events():
        if event.device_type() == DeviceType.CUDA and event.duration_ns() > 0:
            span = Span(event.name(), _grid_of(event), event.start_ns(), event.duration_ns())
            launches[event.correlation_id()].append(span)
    whole = sorted((sorted(each, key=lambda s: s.start) for each in launches.values()), key=_start)
    return [list(chain(*whole[at : at + parts])) for at in range(0, len(whole), parts)]


def _start(launch: Sequence[Span]) -> int:
    return launch[0].start


def _grid_of(event: Any) -> tuple[int, ...]:
    try:
        facts: Mapping[str, Any] = json.loads("{" + event.metadata_json() + "}")
    except (AttributeError, ValueError):
        return ()
    return tuple(facts.get("grid", ()))


def _is_in_order(nodes: Sequence[Node], launch: Sequence[Span]) -> bool:
    return all(_agree(node, span) for node, span in zip(nodes, launch, strict=True))


def _agree(node: Node, span: Span) -> bool:
    if node.kind in ("memcpy", "memset"):
        return span.name.lower().startswith(node.kind)
    return span.name == node.name and span.grid in ((), node.grid)


def _matched(nodes: Sequence[Node], launch: Sequence[Span]) -> list[Span | None]:
    """The span of each node, of alike ones the first that is left; ``None`` where there is none."""
    waiting: dict[str, list[Span]] = defaultdict(list)
    for span in launch:
        waiting[_what(span.name)].append(span)
    found: list[Span | None] = []
    for node in nodes:
        alike = waiting[_what(node.name)]
        mine = next((span for span in alike if _agree(node, span)), None)
        if mine is not None:
            alike.remove(mine)
        found.append(mine)
    return found


def _what(name: str) -> str:
    """A kernel's name; of copies and fills only what they are."""
    kind = name.split(" ")[0].lower()
    return kind if kind in ("memcpy", "memset") else name


def _with_times(node: Node, spans: Sequence[Span]) -> Node:
    if not spans:
        return node
    return replace(
        node,
        duration_us=median(span.duration for span in spans) / 1e3,
        start_us=median(span.start for span in spans) / 1e3,
    )


def _whole(
    nodes: Sequence[Node], edges: Sequence[Edge], launches: Sequence[Sequence[Span]], how: str
) -> Timing:
    launches = sorted(launches, key=_lasted)
    lasted = [_lasted(launch) for launch in launches]
    middle = (len(launches) - 1) // 2
    busy = _union(launches[middle])
    p95 = quantiles(lasted, n=20, method="inclusive")[-1] if len(lasted) > 1 else lasted[0]
    path = critical_path(nodes, edges)
    return Timing(
        replays=len(launches),
        p50_us=lasted[middle] / 1e3,
        p95_us=p95 / 1e3,
        busy_us=busy / 1e3,
        gap_us=(lasted[middle] - busy) / 1e3,
        critical_path=path,
        critical_us=sum(nodes[index].duration_us or 0.0 for index in path),
        bound_by=how,
    )


def _lasted(launch: Sequence[Span]) -> int:
    return max(span.end for span in launch) - launch[0].start


def _union(launch: Sequence[Span]) -> int:
    """Nanoseconds in which at least one of them ran."""
    total, at = 0, launch[0].start
    for span in launch:
        total += max(span.end - max(at, span.start), 0)
        at = max(at, span.end)
    return total
