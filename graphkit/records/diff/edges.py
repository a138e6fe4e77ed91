"""Which orders between the nodes that two graphs share changed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from graphkit.records.diff.nodes import Change, Pair
from graphkit.records.graph import GraphRecord

_Sources = dict[int, dict[int, str]]
"""For each node those it waits for, and the kind of edge; ``through`` for a way by other nodes."""

THROUGH = "through others"


def edge_changes(
    before: GraphRecord, after: GraphRecord, pairs: Sequence[Pair]
) -> dict[int, list[Change]]:
    """What the shared nodes wait for otherwise than they did, by their index in after.

    A node that was put between two others changes nothing for them: they are in order still.
    """
    index = {pair[0].index: pair[1].index for pair in pairs}
    names = {node.index: f"edge from #{node.index} {node.short_name}" for _, node in pairs}
    was = _sources(before, index)
    now = _sources(after, {after_index: after_index for after_index in names})
    found = {node: list(_changes(was[node], now[node], names)) for node in names}
    return {node: changes for node, changes in found.items() if changes}


def _changes(
    was: Mapping[int, str], now: Mapping[int, str], names: Mapping[int, str]
) -> Iterator[Change]:
    for source in sorted(was.keys() | now.keys()):
        before, after = was.get(source, ""), now.get(source, "")
        if before != after and not (before and after and THROUGH in (before, after)):
            yield Change(field=names[source], before=before, after=after)


def _sources(record: GraphRecord, shared: Mapping[int, int]) -> _Sources:
    """What each shared node waits for, named by the indices that ``shared`` leads to."""
    incoming: _Sources = defaultdict(dict)
    for edge in record.edges:
        incoming[edge.target][edge.source] = edge.kind
    return defaultdict(
        dict, {shared[n]: dict(_shared_sources(n, incoming, shared)) for n in shared}
    )


def _shared_sources(
    node: int, incoming: _Sources, shared: Mapping[int, int]
) -> Iterable[tuple[int, str]]:
    waiting = [(source, kind) for source, kind in incoming[node].items()]
    seen = set()
    while waiting:
        source, kind = waiting.pop()
        if source in shared:
            yield shared[source], kind
        elif source not in seen:
            seen.add(source)
            waiting += [(further, THROUGH) for further in incoming[source]]
