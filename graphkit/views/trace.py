"""Graphs in Chrome's trace event format, which Perfetto opens."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, groupby
from typing import Any, NamedTuple

from graphkit.records import GraphRecord, Node, extent
from graphkit.views.module_tree import nodes_in_modules
from graphkit.views.selection import NamedGraph

Event = dict[str, Any]
_NOMINAL_NS = 1000
_LIMIT_NS = 1 << 50
"""Times from here on, 13 days, are invalid: as microseconds, doubles hold no single nanoseconds."""


class _Span(NamedTuple):
    """A node with its time in ns, and the names of the modules around it, outermost first."""

    node: Node
    begin: int
    end: int
    modules: tuple[str, ...]


def trace_text(graphs: Sequence[NamedGraph]) -> str:
    """Return the graphs as JSON text: a process per graph, a track of modules, tracks of nodes.

    Nodes that overlap in time are on separate tracks. A node without a duration, such as a child
    graph, has length 0 at the end of the node before it.
    """
    events = [_process(number, *named) for number, named in enumerate(graphs, 1)]
    return json.dumps(
        {"displayTimeUnit": "ns", "traceEvents": list(chain.from_iterable(events))},
        separators=(",", ":"),
    )


def _process(number: int, title: str, graph: GraphRecord) -> Iterator[Event]:
    is_measured = any(node.duration_us is not None for node in graph.nodes)
    note = "" if is_measured else " (not measured: a nominal 1 us per node)"
    spans = sorted(_spans(graph, is_measured), key=lambda span: (span.begin, -span.end))
    tracks = free_lanes((span.begin, span.end) for span in spans)
    modules = number  # Perfetto reads thread 0 as the process's own, which has the process's number
    yield _name("process_name", number, modules, f"{title}{note}")
    yield _name("thread_name", number, modules, "modules")
    for track in range(1, max(tracks, default=0) + 1):
        name = "nodes" if track == 1 else f"nodes {track}"
        yield _name("thread_name", number, modules + track, name)
    for event in _module_slices(spans, 0, math.inf):
        yield {**event, "pid": number, "tid": modules}
    for span, track in zip(spans, tracks, strict=True):
        yield {**_node_slice(span), "pid": number, "tid": modules + track}


def _module_slices(spans: Sequence[_Span], depth: int, limit: float) -> Iterator[Event]:
    """Yield a slice for each run of nodes of one module by time, each before those inside of it.

    A module that runs again after others has a slice for each time. A slice ends where the next one
    of its depth begins, even if its last node takes longer: slices of a track must nest.
    """
    runs = [list(run) for _, run in groupby(spans, key=lambda span: span.modules[: depth + 1])]
    begins = [*(run[0].begin for run in runs), limit]
    for run, following in zip(runs, begins[1:], strict=True):
        modules = run[0].modules[: depth + 1]
        end = min(max(span.end for span in run), following)
        if len(modules) > depth:
            facts = {"module": ".".join(modules), "nodes": len(run)}
            yield _slice(modules[-1], "module", run[0].begin, end, facts)
            yield from _module_slices(run, depth + 1, end)


def _spans(graph: GraphRecord, is_measured: bool) -> Iterator[_Span]:
    at = 0
    for modules, node in nodes_in_modules(graph):
        begin, length = at, 0 if is_measured else _NOMINAL_NS
        if is_measured and node.duration_us is not None and node.start_us is not None:
            begin, length = _ns(node.start_us), _ns(node.duration_us)
        at = begin + length
        yield _Span(node, begin, at, modules)


def _ns(time_us: float) -> int:
    time = time_us * 1000
    return round(time) if 0 <= time < _LIMIT_NS else 0


def _node_slice(span: _Span) -> Event:
    node = span.node
    facts = {
        "node": node.index, "name": node.name, "grid": extent(node.grid),
        "block": extent(node.block), "op": node.op, "source": node.source, "module": node.module,
        "scope": node.scope,
    }  # fmt: skip
    known = {name: fact for name, fact in facts.items() if fact != ""}
    return _slice(node.short_name, node.kind, span.begin, span.end, known)


def _slice(name: str, category: str, begin: float, end: float, facts: Event) -> Event:
    times = {"ts": _us(begin), "dur": _us(end - begin)}
    return {"ph": "X", "name": name or category, "cat": category, **times, "args": facts}


def _us(time_ns: float) -> float:
    """Return microseconds that Perfetto, which truncates to nanoseconds, reads back exactly."""
    time = time_ns / 1000
    return time if int(time * 1000.0) == time_ns else math.nextafter(time, math.inf)


def _name(what: str, process: int, track: int, name: str) -> Event:
    return {"ph": "M", "name": what, "pid": process, "tid": track, "args": {"name": name}}


def free_lanes(spans: Iterable[tuple[float, float]]) -> list[int]:
    """Return for each span, by begin, the first lane, from 1, that is free when it begins."""
    ends: list[float] = []
    lanes = []
    for begin, end in spans:
        lane = next((at for at, reached in enumerate(ends) if reached <= begin), len(ends))
        ends[lane : lane + 1] = [end]
        lanes.append(lane + 1)
    return lanes
