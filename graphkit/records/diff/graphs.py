"""What changed between two graphs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from graphkit.records.diff.edges import edge_changes
from graphkit.records.diff.nodes import Change, NodeChange, Pair, changes_of, pair_nodes
from graphkit.records.diff.words import words_of
from graphkit.records.graph import GraphRecord, Node

_TIMING = ("p50_us", "p95_us", "busy_us", "gap_us", "critical_us")
_MEMORY = ("graph_bytes", "pool_bytes")
_Figures = Mapping[str, float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A number that is not what it was.

    Attributes:
        name: Which, its unit at its end, such as ``replay_us``.
        before, after: ``None`` where it was not measured.
    """

    SPARSE: ClassVar[bool] = True
    name: str
    before: float | None
    after: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphDiff:
    """What changed between two graphs.

    Attributes:
        before, after: Their names.
        num_nodes_before, num_nodes_after: How many nodes they have.
        added: Nodes that are in after alone, as they are there.
        removed: Nodes that are in before alone, as they were there.
        changed: Nodes that are in both but not the same, in the order of after.
        figures: What timing and memory say otherwise.
        words: What became of the nodes, as sentences; ``nothing changed`` if nothing did.
    """

    before: str
    after: str
    num_nodes_before: int
    num_nodes_after: int
    added: tuple[Node, ...]
    removed: tuple[Node, ...]
    changed: tuple[NodeChange, ...]
    figures: tuple[Figure, ...]
    words: tuple[str, ...]

    @property
    def is_same(self) -> bool:
        """Whether the same nodes do the same, however long they take."""
        return not (self.added or self.removed or self.changed)


def diff_graphs(before: GraphRecord, after: GraphRecord) -> GraphDiff:
    """What changed between two graphs, which may be two sizes of one record.

    Pointers are compared by what lies there; times of single nodes and source lines are not
    compared at all.
    """
    pairs = pair_nodes(before.nodes, after.nodes)
    added = _others(after, {node.index for _, node in pairs})
    removed = _others(before, {node.index for node, _ in pairs})
    changed = tuple(_changed_nodes(pairs, edge_changes(before, after, pairs)))
    return GraphDiff(
        before=before.name,
        after=after.name,
        num_nodes_before=len(before.nodes),
        num_nodes_after=len(after.nodes),
        added=added,
        removed=removed,
        changed=changed,
        figures=changed_figures(_figures(before), _figures(after)),
        words=words_of(added, removed, changed),
    )


def changed_figures(before: _Figures, after: _Figures) -> tuple[Figure, ...]:
    """The numbers that differ, in the order of after."""
    names = (name for name in {**after, **before} if before.get(name) != after.get(name))
    return tuple(Figure(name=n, before=before.get(n), after=after.get(n)) for n in names)


def _others(record: GraphRecord, shared: set[int]) -> tuple[Node, ...]:
    return tuple(node for node in record.nodes if node.index not in shared)


def _changed_nodes(
    pairs: Sequence[Pair], edges: Mapping[int, list[Change]]
) -> Iterator[NodeChange]:
    for before, after in pairs:
        changes = (*changes_of(before, after), *edges.get(after.index, ()))
        if changes:
            yield NodeChange(
                before=before.index,
                after=after.index,
                name=after.short_name,
                module=after.module,
                changes=changes,
            )


def _figures(record: GraphRecord) -> dict[str, float | None]:
    timing = {name: getattr(record.timing, name, None) for name in _TIMING}
    return timing | {name: getattr(record.memory, name, None) for name in _MEMORY}
