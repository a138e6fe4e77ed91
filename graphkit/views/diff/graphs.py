"""Comparison of two graphs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from graphkit.records import (
    FieldChange,
    GraphDiff,
    GraphRecord,
    MetricChange,
    Node,
    NodeChange,
)
from graphkit.views.diff.edges import edge_changes
from graphkit.views.diff.nodes import NodePair, node_changes
from graphkit.views.diff.renames import Renames, pair_across_renames
from graphkit.views.diff.sentences import NOTHING_CHANGED, argument_sentences, sentences

_TIMING = ("unprofiled_us", "p50_us", "p95_us", "critical_us")
_TIMELINE = ("busy_us", "gap_us")
_MEMORY = ("graph_bytes", "pool_bytes")
_Metrics = Mapping[str, float | None]
_NO_RENAMES: Renames = MappingProxyType({})


def diff_graphs(
    before: GraphRecord, after: GraphRecord, renamed: Renames = _NO_RENAMES
) -> GraphDiff:
    """Compare two graphs, which may be two sizes of one record.

    Pointers are compared by the memory that they point to. Durations of single nodes and source
    lines are not compared. The new path of a module that was renamed or moved is not a change of
    its nodes.

    Args:
        before: A graph.
        after: The graph to compare with it.
        renamed: Paths of modules that only other graphs contain, by the path before. Both graphs
            may read their weights.
    """
    pairs, renamed = pair_across_renames(before.nodes, after.nodes, renamed)
    added = _unpaired(after, {node.index for _, node in pairs})
    removed = _unpaired(before, {node.index for node, _ in pairs})
    changed = tuple(_changed_nodes(pairs, edge_changes(before, after, pairs)))
    words, details = sentences(added, removed, changed, renamed), argument_sentences(changed)
    return GraphDiff(
        before=before.name,
        after=after.name,
        num_nodes_before=len(before.nodes),
        num_nodes_after=len(after.nodes),
        added=added,
        removed=removed,
        changed=changed,
        renamed=renamed,
        figures=metric_changes(_metrics(before), _metrics(after)),
        words=words or (() if details else (NOTHING_CHANGED,)),
        details=details,
    )


def metric_changes(before: _Metrics, after: _Metrics) -> tuple[MetricChange, ...]:
    """Return the numbers that differ, in the order of ``after``."""
    names = (name for name in {**after, **before} if before.get(name) != after.get(name))
    return tuple(MetricChange(name=n, before=before.get(n), after=after.get(n)) for n in names)


def _unpaired(record: GraphRecord, paired: set[int]) -> tuple[Node, ...]:
    return tuple(node for node in record.nodes if node.index not in paired)


def _changed_nodes(
    pairs: Sequence[NodePair], edges: Mapping[int, list[FieldChange]]
) -> Iterator[NodeChange]:
    for before, after in pairs:
        changes = (*node_changes(before, after), *edges.get(after.index, ()))
        if changes:
            yield NodeChange(
                before=before.index,
                after=after.index,
                name=after.short_name,
                module=after.module,
                changes=changes,
            )


def _metrics(record: GraphRecord) -> dict[str, float | None]:
    timeline = record.timeline
    measured = timeline if timeline.nodes else None
    return {
        name: getattr(part, name, None)
        for names, part in (
            (_TIMING, record.timing), (_TIMELINE, measured), (_MEMORY, record.memory)
        )
        for name in names
    }  # fmt: skip
