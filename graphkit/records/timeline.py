"""The replay that the times of a record's nodes describe: when nodes ran, and the gaps between."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from graphkit.records.node import Node

_LIMIT_US = 1e12
"""Times from here on, 11 days, are damaged: they have no place on the same scale as others."""


@dataclass(frozen=True, slots=True)
class Gap:
    """A time in which no node runs.

    Attributes:
        begin, us: When it begins and how long it is, in us.
        node: Index of the node that ends it.
    """

    begin: float
    us: float
    node: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """The measured nodes of a graph in time.

    Starts and durations of nodes are medians over the profiled replays, so that the whole may
    differ a little from the median time of these replays.

    Attributes:
        nodes: The nodes whose start and duration were measured, by start.
        gaps: The gaps between them, by time. The only definition of a gap: pages, timelines and
            differences of records show these.
        end_us: When the last node ends; 0 without measured nodes.
    """

    nodes: tuple[Node, ...]
    gaps: tuple[Gap, ...]
    end_us: float

    @classmethod
    def from_nodes(cls, nodes: Iterable[Node]) -> Self:
        """Return the nodes of a graph in time. Nodes with invalid times are omitted."""
        measured = sorted(filter(_is_measured, nodes), key=lambda node: (node.start_us, node.index))
        gaps, reached = [], 0.0
        for node in measured:
            start = node.start_us or 0.0
            if start > reached:
                gaps.append(Gap(reached, start - reached, node.index))
            reached = max(reached, node.end_us)
        return cls(tuple(measured), tuple(gaps), reached)

    @property
    def gap_us(self) -> float:
        """Time in which no node runs."""
        return sum(gap.us for gap in self.gaps)

    @property
    def busy_us(self) -> float:
        """Time in which at least one node runs."""
        return self.end_us - self.gap_us


def _is_measured(node: Node) -> bool:
    return (
        node.start_us is not None
        and node.duration_us is not None
        and 0 <= node.start_us <= node.end_us < _LIMIT_US
    )
