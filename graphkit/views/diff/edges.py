"""Changes of the order between the nodes that two graphs share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from graphkit.records import FieldChange, GraphRecord
from graphkit.views.diff.nodes import NodePair

_Sources = dict[int, dict[int, str]]
"""By node: the nodes that it waits for, each with the kind of the edge or ``_INDIRECT``."""

_INDIRECT = "through others"
"""In place of a kind: the path leads through nodes that only one graph contains."""


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

    Args:
        record: One of the graphs.
        shared: The index in ``after`` of each shared node, by its index in ``record``.
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
