"""Comparison of two graphs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from graphkit.records import FieldChange, GraphDiff, GraphRecord, MetricChange, Node, NodeChange
from graphkit.views.diff.nodes import NodePair, node_changes, pair_nodes
from graphkit.views.diff.sentences import NOTHING_CHANGED, argument_sentences, sentences

_Sources = dict[int, dict[int, str]]
"""By node: the nodes that it waits for, each with the kind of the edge or ``_INDIRECT``."""

_INDIRECT = "through others"
"""In place of a kind: the path leads through nodes that only one graph contains."""
_Metrics = Mapping[str, float | None]


def edge_changes(
    before: GraphRecord, after: GraphRecord, pairs: Sequence[NodePair]
) -> dict[int, list[FieldChange]]:
    """Return the changed incoming edges of the shared nodes, by their index in ``after``.

    A node inserted between two others changes nothing for them: they are still in order.
    """
    after_index = {old.index: new.index for old, new in pairs}
    names = {node.index: f"edge from #{node.index} {node.short_name}" for _, node in pairs}
    old_sources = _sources(before, after_index)
    new_sources = _sources(after, {index: index for index in names})
    by_node = {node: list(_changes(old_sources[node], new_sources[node], names)) for node in names}
    return {node: changes for node, changes in by_node.items() if changes}


def _changes(
    old: Mapping[int, str], new: Mapping[int, str], names: Mapping[int, str]
) -> Iterator[FieldChange]:
    for source in sorted(old.keys() | new.keys()):
        before, after = old.get(source, ""), new.get(source, "")
        is_still_ordered = before and after and _INDIRECT in (before, after)
        if before != after and not is_still_ordered:
            yield FieldChange(field=names[source], before=before, after=after)


def _sources(record: GraphRecord, shared: Mapping[int, int]) -> _Sources:
    """Return the shared nodes that each shared node waits for.

    ``shared`` has the index in ``after`` of each one by its index in ``record``.
    """
    incoming: _Sources = defaultdict(dict)
    for edge in record.edges:
        incoming[edge.target][edge.source] = edge.kind
    sources: _Sources = {}
    for node, index in shared.items():
        kinds = sources[index] = {}
        for source, kind in _shared_sources(node, incoming, shared):
            if kind != _INDIRECT or source not in kinds:  # a direct edge counts beside a path
                kinds[source] = kind
    return sources


def _shared_sources(
    node: int, incoming: _Sources, shared: Mapping[int, int]
) -> Iterable[tuple[int, str]]:
    """Yield the shared nodes that a node waits for, also through nodes of this graph alone."""
    waiting = list(incoming[node].items())
    seen = set()
    while waiting:
        source, kind = waiting.pop()
        if source in shared:
            yield shared[source], kind
        elif source not in seen:
            seen.add(source)
            waiting += [(further, _INDIRECT) for further in incoming[source]]


def diff_graphs(before: GraphRecord, after: GraphRecord) -> GraphDiff:
    """Compare two graphs, which may be two sizes of one record.

    Pointers are compared by the memory that they point to. Durations of single nodes and source
    lines are not compared.
    """
    pairs = pair_nodes(before.nodes, after.nodes)
    added = _unpaired(after, {node.index for _, node in pairs})
    removed = _unpaired(before, {node.index for node, _ in pairs})
    changed = tuple(_changed_nodes(pairs, edge_changes(before, after, pairs)))
    words, details = sentences(added, removed, changed), argument_sentences(changed)
    return GraphDiff(
        before=before.name,
        after=after.name,
        num_nodes_before=len(before.nodes),
        num_nodes_after=len(after.nodes),
        added=added,
        removed=removed,
        changed=changed,
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
    timeline = record.timeline if record.timeline.nodes else None
    return {
        name: getattr(part, name, None)
        for part, names in (
            (record.timing, ("unprofiled_us", "p50_us", "p95_us", "critical_us")),
            (timeline, ("busy_us", "gap_us")),
            (record.memory, ("graph_bytes", "pool_bytes")),
        )
        for name in names
    }
