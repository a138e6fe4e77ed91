"""What changed between two graphs, and between two records. ``graphkit.views.diff`` computes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from graphkit.records.node import Node
from graphkit.records.record import Count, Real, Record


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldChange:
    """A field whose text differs.

    Attributes:
        field: Its name, such as ``grid``.
        before, after: Its values as text; empty where the field is absent.
    """

    SPARSE: ClassVar[bool] = True
    field: str
    before: str
    after: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricChange:
    """A measured or counted number that differs.

    Attributes:
        name: Its name with the unit as suffix, such as ``replay_us``.
        before, after: Its values; ``None`` where it was not measured.
    """

    SPARSE: ClassVar[bool] = True
    name: str
    before: Real | None
    after: Real | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeChange:
    """A node that both graphs contain and that differs.

    Attributes:
        before, after: Its index in either graph.
        name: Its short name in the graph after.
        module: Its module in the graph after.
        changes: The fields that differ; at least one.
    """

    SPARSE: ClassVar[bool] = True
    before: Count
    after: Count
    name: str
    module: str
    changes: tuple[FieldChange, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphDiff:
    """What changed between two graphs.

    Attributes:
        before, after: Names of the graphs.
        num_nodes_before, num_nodes_after: Number of nodes of either graph.
        added: Nodes of the graph after that the graph before lacks.
        removed: Nodes of the graph before that the graph after lacks.
        changed: Nodes of both graphs that differ, in the order of the graph after.
        figures: Timing and memory figures that differ.
        words: The changes of nodes as sentences, except of arguments; ``nothing changed`` if
            there is no change at all.
        details: The changes of arguments as sentences.
    """

    before: str
    after: str
    num_nodes_before: Count
    num_nodes_after: Count
    added: tuple[Node, ...]
    removed: tuple[Node, ...]
    changed: tuple[NodeChange, ...]
    figures: tuple[MetricChange, ...]
    words: tuple[str, ...]
    details: tuple[str, ...] = ()

    @property
    def is_same(self) -> bool:
        """True if both graphs have the same nodes and modules. Timing and memory may differ."""
        return not (self.added or self.removed or self.changed)


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeDiff:
    """A captured size whose figures differ.

    Attributes:
        mode: Name of the forward mode.
        batch_size: The captured size.
        figures: The figures that differ.
    """

    mode: str
    batch_size: Count
    figures: tuple[MetricChange, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffRecord(Record):
    """What changed between two records.

    Attributes:
        before, after: Titles of the records: a target, a command or a graph.
        environment: Facts of the environments that differ.
        sizes: Captured sizes of both records whose figures differ.
        graphs: Graphs of both records, changed or not.
        only_before, only_after: Names of sizes and graphs that the other record lacks.
    """

    KIND: ClassVar[str] = "diff"
    before: str
    after: str
    environment: tuple[FieldChange, ...]
    sizes: tuple[SizeDiff, ...]
    graphs: tuple[GraphDiff, ...]
    only_before: tuple[str, ...]
    only_after: tuple[str, ...]
