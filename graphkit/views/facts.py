"""Facts of records and graphs as names and texts: where they were made, and their times."""

from __future__ import annotations

from collections.abc import Iterator

from graphkit.records import (
    Environment,
    GraphRecord,
    RecordWithGraphs,
    count_of,
    figure_name,
)
from graphkit.views.formatting import us
from graphkit.views.module_tree import total_us


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


PROFILED = (
    "Times of nodes and gaps were measured in profiled replays, which take longer, above all in "
    "the gaps."
)


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


def further_time_facts(graph: GraphRecord) -> Iterator[tuple[str, str]]:
    """Yield the sums of node times of a graph."""
    timing, whole = graph.timing, total_us(graph.nodes)
    if timing:
        path = count_of(len(timing.critical_path), "node")
        yield figure_name("critical_us"), f"{_us(timing.critical_us)}, {path}"
    if whole is not None:
        yield "sum of nodes", _us(whole)
    if timing:
        yield "profiled replays", f"{timing.replays:,}"


def _us(value: float | None) -> str:
    return "not measured" if value is None else f"{us(value)} us"
