"""Comparison of two records."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from itertools import chain

from graphkit.diff.graph_matching import MatchedGraphs, match_graphs
from graphkit.diff.graphs import diff_graphs, metric_changes
from graphkit.diff.nodes import field_changes
from graphkit.records import (
    CaptureRecord,
    DiffRecord,
    GraphDiff,
    GraphRecord,
    Record,
    RecordWithGraphs,
    SizeDiff,
    SizeRecord,
    require_graphs,
)

_Sizes = dict[str, tuple[str, SizeRecord]]
"""Mode and size record, by the name ``MODE SIZE``."""
_METRICS = ("num_tokens", "num_nodes", "capture_ms", "pool_bytes", "replay_us", "eager_us")


def diff_records(before: Record, after: Record) -> DiffRecord:
    """Compare two records with graphs, of the same kind or not.

    Graphs of runners are matched by mode and size, others by name, by the line that captured them,
    or by order. Two records of one graph each are always compared.

    Raises:
        RecordError: A record is of a kind that holds no graphs.
    """
    old, new = require_graphs(before), require_graphs(after)
    matched = _matched(old, new)
    old_sizes, new_sizes = _sizes(old), _sizes(new)
    return DiffRecord(
        before=old.title,
        after=new.title,
        environment=tuple(field_changes(_environment(old), _environment(new))),
        sizes=tuple(_size_diffs(old_sizes, new_sizes)),
        graphs=_graph_diffs(matched),
        only_before=_names_only_in(old_sizes, new_sizes, matched.only_before),
        only_after=_names_only_in(new_sizes, old_sizes, matched.only_after),
    )


def _matched(before: RecordWithGraphs, after: RecordWithGraphs) -> MatchedGraphs:
    if isinstance(before, GraphRecord) and isinstance(after, GraphRecord):
        return MatchedGraphs(((before, after),))
    return match_graphs(before.graphs, after.graphs)


def _graph_diffs(matched: MatchedGraphs) -> tuple[GraphDiff, ...]:
    """Compare the graphs; a module that one of them shows to be renamed is so in all."""
    found = tuple(diff_graphs(*pair) for pair in matched.pairs)
    renamed = dict(chain.from_iterable(diff.renamed.items() for diff in found))
    return tuple(diff_graphs(*pair, renamed) for pair in matched.pairs) if renamed else found


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


def _names_only_in(
    sizes: _Sizes, others: _Sizes, graphs: tuple[GraphRecord, ...]
) -> tuple[str, ...]:
    """Return the names of sizes and graphs, or ``nodes of`` a size that the other record has."""
    only_sizes = [name for name in sizes if name not in others]
    only_graphs = [f"nodes of {g.name}" if g.name in others else g.name for g in graphs]
    return tuple(dict.fromkeys([*only_sizes, *only_graphs]))
