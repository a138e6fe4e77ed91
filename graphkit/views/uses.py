"""Uses of memory over the nodes of a graph, as pictures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

_EIGHTHS = " ▁▂▃▄▅▆▇█"
_WIDTH = 20
"""Cells of a picture, as text."""


class Uses(NamedTuple):
    """The nodes that use an address.

    Attributes:
        first, last: Positions of the first and of the last node.
        nodes: Positions of all of them.
        total: Number of nodes of the graph.
    """

    first: int
    last: int
    nodes: tuple[int, ...]
    total: int

    def draw(self, width: int = _WIDTH) -> str:
        """Return blocks where nodes use the address, and shade from the first to the last one."""
        used = {_cell(node, self.total, width) for node in self.nodes}
        begin, end = min(used), max(used)
        return " " * begin + "".join("█" if at in used else "░" for at in range(begin, end + 1))


class LiveCounts(NamedTuple):
    """Number of addresses between their first and their last use, at each node."""

    counts: tuple[int, ...]

    def draw(self, width: int = _WIDTH) -> str:
        """Return the largest number of each cell as a bar of an eighth to a whole cell."""
        total, cells = len(self.counts), [0] * width
        for node, count in enumerate(self.counts):
            cell = _cell(node, total, width)
            cells[cell] = max(cells[cell], count)
        most = max(cells, default=0) or 1
        return "".join(_EIGHTHS[-(-count * 8 // most)] for count in cells).rstrip()


def uses_of(nodes: Iterable[int], total: int) -> Uses:
    """Return the uses by these nodes, at least one, of a graph of ``total`` nodes."""
    found = tuple(sorted(nodes))
    return Uses(found[0], found[-1], found, total)


def live_counts(uses: Sequence[Uses], total: int) -> LiveCounts:
    """Return how many of the addresses are in use at each of ``total`` nodes."""
    changes = [0] * (total + 1)
    for each in uses:
        changes[each.first] += 1
        changes[each.last + 1] -= 1
    return LiveCounts(tuple(accumulate(changes[:total])))


def _cell(node: int, total: int, width: int) -> int:
    return min(node * width // max(total, 1), max(width - 1, 0))
