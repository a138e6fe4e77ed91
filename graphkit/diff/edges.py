"""Changes of the order between the nodes that two graphs share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from graphkit.diff.nodes import NodePair
from graphkit.records import FieldChange, GraphRecord

_Sources = dict[int, dict[int, str]]
"""For each node the nodes that it waits for, with the kind of edge or ``_INDIRECT``."""

_INDIRECT = "through others"


def edge_changes(
    before: GraphRecord, after: GraphRecord, pairs: Sequence[NodePair]
) -> dict[int, list[FieldChange]]:
    """Return the changed incoming edges of the shared nodes, by their index in ``after``.

    A node inserted between two others changes nothing for them: they are still in order.
    """
    index = {pair[0].index: pair[1].index for pair in pairs}
    names = {node.index: f"edge from #{node.index} {node.short_name}" for _, node in pairs}
    old_sources = _sources(before, index)
    new_sources = _sources(after, {after_index: after_index for after_index in names})
    found = {node: list(_changes(old_sources[node], new_sources[node], names)) for node in names}
    return {node: changes for node, changes in found.items() if changes}


def _changes(
    old: Mapping[int, str], new: Mapping[int, str], names: Mapping[int, str]
) -> Iterator[FieldChange]:
    for source in sorted(old.keys() | new.keys()):
        before, after = old.get(source, ""), new.get(source, "")
        if before != after and not (before and after and _INDIRECT in (before, after)):
            yield FieldChange(field=names[source], before=before, after=after)


def _sources(record: GraphRecord, shared: Mapping[int, int]) -> _Sources:
    """Return the shared nodes that each shared node waits for, by the indices in ``shared``."""
    incoming: _Sources = defaultdict(dict)
    for edge in record.edges:
        incoming[edge.target][edge.source] = edge.kind
    return defaultdict(
        dict, {shared[n]: dict(_shared_sources(n, incoming, shared)) for n in shared}
    )


def _shared_sources(
    node: int, incoming: _Sources, shared: Mapping[int, int]
) -> Iterable[tuple[int, str]]:
    """Walk backwards from a node, through the nodes that only this graph contains."""
    waiting = list(incoming[node].items())
    seen = set()
    while waiting:
        source, kind = waiting.pop()
        if source in shared:
            yield shared[source], kind
        elif source not in seen:
            seen.add(source)
            waiting += [(further, _INDIRECT) for further in incoming[source]]
