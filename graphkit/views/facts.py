"""Facts of records and graphs as names and texts: where they were made, contents, memory, times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from graphkit.records import Environment, GraphRecord, RecordWithGraphs, count_of, figure_name
from graphkit.views.formatting import size, us
from graphkit.views.module_tree import total_us

PROFILED = (
    "Times of nodes and gaps were measured in profiled replays, which take longer, above all in "
    "the gaps."
)


def environment_facts(record: RecordWithGraphs) -> Iterator[tuple[str, str]]:
    """Yield the device, the backend and the versions, as far as they are known."""
    environment = record.environment
    yield "device", environment.device
    yield "backend", record.backend
    for name in ("torch", "triton", "cuda", "driver", "graphkit"):
        if getattr(environment, name):
            yield name, getattr(environment, name)


def environment_line(target: str, backend: str, environment: Environment) -> str:
    """Return the target and where it ran, such as ``tiny on cpu, recorder backend, torch 2.13``."""
    has_gpu = environment.driver and environment.device != "cpu"
    gpu = f", CUDA {environment.cuda}, driver {environment.driver}" if has_gpu else ""
    return f"{target} on {environment.device}, {backend} backend, torch {environment.torch}{gpu}"


def time_facts(graph: GraphRecord) -> Iterator[tuple[str, str]]:
    """Yield what was measured of a graph, the most important first.

    Only ``unprofiled`` is a time without the profiler. ``the profiler adds`` says how much longer
    the median profiled replay took. Busy time and gaps are sums over the page's nodes.
    """
    timing, timeline = graph.timing, graph.timeline
    if timing is None:
        yield "times", "not measured"
        return
    unprofiled = timing.unprofiled_us
    yield figure_name("unprofiled_us"), _us(unprofiled)
    yield "profiled", f"p50 {_us(timing.p50_us)}, p95 {_us(timing.p95_us)}"
    if unprofiled is not None and timing.p50_us > unprofiled:
        yield "the profiler adds", _us(timing.p50_us - unprofiled)
    share = f" ({timeline.gap_us / timeline.end_us:.0%})" if timeline.end_us > 0 else ""
    yield figure_name("busy_us"), _us(timeline.busy_us)
    yield figure_name("gap_us"), f"{_us(timeline.gap_us)}{share}"


def graph_facts(graph: GraphRecord) -> Iterator[tuple[str, str]]:
    """Yield name and text of what is known of a whole graph, the most important first."""
    yield "nodes", f"{len(graph.nodes):,}"
    yield from time_facts(graph)
    if graph.memory:
        memory = f"{size(graph.memory.graph_bytes)} in a pool of {size(graph.memory.pool_bytes)}"
        yield "memory", memory
    if graph.captured_at:
        yield "captured at", graph.captured_at
    kinds = Counter(node.kind for node in graph.nodes).most_common()
    if kinds:
        yield "kinds", ", ".join(f"{count:,} {kind}" for kind, count in kinds)
    timing, whole = graph.timing, total_us(graph.nodes)
    if timing:
        path = count_of(len(timing.critical_path), "node")
        yield figure_name("critical_us"), f"{_us(timing.critical_us)}, {path}"
    if whole is not None:
        yield "sum of nodes", _us(whole)
    if timing:
        yield "profiled replays", f"{timing.replays:,}"
    programmatic = sum(edge.kind == "programmatic" for edge in graph.edges)
    yield "edges", f"{len(graph.edges):,}, {programmatic:,} programmatic (PDL)"


def _us(value: float | None) -> str:
    return "not measured" if value is None else f"{us(value)} us"
