"""Selection of the figures that changed much, and of the figures that got worse."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from graphkit.records import DiffRecord, MetricChange, figure_heading

TIMES = ("replay_us", "unprofiled_us", "p50_us", "busy_us", "critical_us")
COSTS = ("num_nodes", *TIMES, "pool_bytes", "graph_bytes")
"""Figures that get worse as they grow, except the times of eager steps and captures."""


def relative_change(figure: MetricChange) -> float | None:
    """Return the change relative to the value before, 0.05 for 5 %; ``None`` without a value."""
    if not figure.before or figure.after is None:
        return None
    return figure.after / figure.before - 1


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
                yield f"{name}: {figure_heading(figure.name)} {part:+.1%}"
