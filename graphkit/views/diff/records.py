"""Comparison of two records: their sizes, the graphs that match, and what got worse."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import asdict, replace

from graphkit.records import (
    CaptureRecord,
    DiffRecord,
    GraphRecord,
    MetricChange,
    Record,
    RecordWithGraphs,
    SizeDiff,
    SizeRecord,
    figure_heading,
    require_graphs,
)
from graphkit.views.diff.graphs import diff_graphs, metric_changes
from graphkit.views.diff.nodes import field_changes

TIMES = ("replay_us", "unprofiled_us", "p50_us", "busy_us", "critical_us")
"""Times of replays and of their nodes, which the recorder does not measure."""
COSTS = ("num_nodes", *TIMES, "pool_bytes", "graph_bytes")
"""Figures that get worse as they grow, except the times of eager steps and captures."""
_Sizes = dict[str, tuple[str, SizeRecord]]
"""Mode and size record, by the name ``MODE SIZE``."""
_LINE_NUMBER = re.compile(r":\d+")
_Matched = tuple[
    list[tuple[GraphRecord, GraphRecord]], Sequence[GraphRecord], Sequence[GraphRecord]
]
"""Graphs that match, in the order of the record after, and those of either record without one."""
_METRICS = ("num_tokens", "num_nodes", "capture_ms", "pool_bytes", "replay_us", "eager_us")
_Key = Callable[[GraphRecord], Hashable]
_KEYS: tuple[_Key, ...] = (
    lambda graph: (graph.mode, graph.batch_size) if graph.mode else (graph.name, graph.captured_at),
    lambda graph: None if graph.mode else graph.name,
    lambda graph: None if graph.mode else _LINE_NUMBER.sub("", graph.captured_at),
    lambda graph: None if graph.mode else "",
)
"""Keys by which graphs match, in turn; a graph whose key is ``None`` matches no other."""


def diff_records(before: Record, after: Record) -> DiffRecord:
    """Compare two records with graphs, of the same kind or not.

    Graphs of runners are matched by mode and size, others by name, by the line that captured them,
    or by order. Two records of one graph each are always compared.

    Raises:
        RecordError: A record is of a kind that holds no graphs.
    """
    old, new = require_graphs(before), require_graphs(after)
    pairs, only_old, only_new = _match_graphs(old, new)
    old_sizes, new_sizes = _sizes(old), _sizes(new)
    return DiffRecord(
        before=old.title,
        after=new.title,
        environment=tuple(field_changes(_environment(old), _environment(new))),
        sizes=tuple(_size_diffs(old_sizes, new_sizes)),
        graphs=tuple(diff_graphs(*pair) for pair in pairs),
        only_before=_names_only_in(old_sizes, new_sizes, only_old),
        only_after=_names_only_in(new_sizes, old_sizes, only_new),
    )


def _environment(record: RecordWithGraphs) -> dict[str, str]:
    return {"backend": record.backend} | asdict(record.environment)


def _sizes(record: RecordWithGraphs) -> _Sizes:
    modes = record.modes if isinstance(record, CaptureRecord) else ()
    return {f"{m.mode} {size.batch_size}": (m.mode, size) for m in modes for size in m.sizes}


def _size_diffs(before: _Sizes, after: _Sizes) -> Iterator[SizeDiff]:
    for name, (mode, size) in after.items():
        if name in before:
            figures = metric_changes(_metrics(before[name][1]), _metrics(size))
            if figures:
                yield SizeDiff(mode=mode, batch_size=size.batch_size, figures=figures)


def _metrics(size: SizeRecord) -> dict[str, float | None]:
    return {name: getattr(size, name) for name in _METRICS}


def _names_only_in(sizes: _Sizes, others: _Sizes, graphs: Sequence[GraphRecord]) -> tuple[str, ...]:
    """Return the names of sizes and graphs, or ``nodes of`` a size that the other record has."""
    only_sizes = [name for name in sizes if name not in others]
    only_graphs = [f"nodes of {g.name}" if g.name in others else g.name for g in graphs]
    return tuple(dict.fromkeys([*only_sizes, *only_graphs]))


def _match_graphs(before: RecordWithGraphs, after: RecordWithGraphs) -> _Matched:
    """Match the graphs of runners by mode and size.

    Match other graphs by name and line; the rest by name, then by file and function without the
    line number, which moves with every edit, then by order. Graphs with equal keys match in order.
    """
    if isinstance(before, GraphRecord) and isinstance(after, GraphRecord):
        return [(before, after)], (), ()
    left, right = dict(enumerate(before.graphs)), dict(enumerate(after.graphs))
    matches: dict[int, int] = {}
    for key in _KEYS:
        for i, j in _matches(left, right, key):
            matches[j] = i
            del left[i], right[j]
    pairs = [(before.graphs[matches[j]], after.graphs[j]) for j in sorted(matches)]
    return pairs, [*left.values()], [*right.values()]


def _matches(
    left: dict[int, GraphRecord], right: dict[int, GraphRecord], key: _Key
) -> list[tuple[int, int]]:
    waiting: dict[Hashable, list[int]] = {}
    for i, graph in left.items():
        waiting.setdefault(key(graph), []).append(i)
    equal = ((waiting.get(key(graph)), j) for j, graph in right.items() if key(graph) is not None)
    return [(indices.pop(0), j) for indices, j in equal if indices]


def have_common_figures(before: Record, after: Record) -> bool:
    """Return True if a graph or a captured size is in both records."""
    old, new = require_graphs(before), require_graphs(after)
    pairs, _, _ = _match_graphs(old, new)
    return bool(pairs or _sizes(old).keys() & _sizes(new).keys())


def relative_change(figure: MetricChange) -> float | None:
    """Return the change relative to the value before, 0.05 for 5 %; ``None`` without a value.

    A change from 0 is infinite.
    """
    if figure.before is None or figure.after is None:
        return None
    change = figure.after - figure.before
    return change / abs(figure.before) if figure.before else math.copysign(math.inf, change)


def with_changes_above(record: DiffRecord, threshold: float) -> DiffRecord:
    """Return the record without figures that changed by at most ``threshold``, 0.05 for 5 %."""

    def large(figures: tuple[MetricChange, ...]) -> tuple[MetricChange, ...]:
        changes = ((figure, relative_change(figure)) for figure in figures)
        return tuple(figure for figure, part in changes if part is None or abs(part) > threshold)

    sizes = (replace(size, figures=large(size.figures)) for size in record.sizes)
    return replace(
        record,
        sizes=tuple(size for size in sizes if size.figures),
        graphs=tuple(replace(graph, figures=large(graph.figures)) for graph in record.graphs),
    )


def regressions(record: DiffRecord, limit: float, costs: Collection[str] = COSTS) -> Iterator[str]:
    """Yield a line per figure among ``costs`` that grew by more than ``limit``, 0.05 for 5 %."""
    sizes = ((f"{size.mode} {size.batch_size}", size.figures) for size in record.sizes)
    graphs = ((graph.after, graph.figures) for graph in record.graphs)
    for name, figures in (*sizes, *graphs):
        for figure in figures:
            part = relative_change(figure)
            if figure.name in costs and part is not None and part > limit:
                text = f"{part:+.1%}" if math.isfinite(part) else f"0 -> {figure.after:,g}"
                yield f"{name}: {figure_heading(figure.name)} {text}"
