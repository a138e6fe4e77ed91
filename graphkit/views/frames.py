"""The time of a graph by module as nested frames, in which equal layers share one frame."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from graphkit.records import GraphRecord, Node, count_of
from graphkit.views.formatting import us
from graphkit.views.module_tree import (
    Branch,
    common_part,
    module_tree,
    node_parts,
    node_phases,
    total_us,
)

_NAMES = 3
"""Most numbers of equal layers that a name lists."""


@dataclass(frozen=True, slots=True)
class Frame:
    """A module, or equal modules of several layers.

    Attributes:
        name: Name inside the frame around it, such as ``layers.* (32 x)``; empty for the root.
        path: Names of the frames around it and its own, dotted.
        parent: Index of the frame around it; ``None`` for the root.
        begin, width: Its place in us, the root from 0; in nodes if no time was measured.
        us: Sum of the durations of its nodes; ``None`` if none was measured.
        num_nodes: Number of its nodes.
        part: Part that all of them belong to; empty if several.
    """

    name: str
    path: str
    parent: int | None
    begin: float
    width: float
    us: float | None
    num_nodes: int
    part: str

    def describe(self, title: str, whole: float | None) -> str:
        """Return its path, time, share and number of nodes; the root has the graph's title."""
        time = "not measured" if self.us is None else f"{us(self.us)} us"
        share = f", {self.us / whole:.1%}" if self.us is not None and whole else ""
        return f"{self.path or title}: {time}{share}, {count_of(self.num_nodes, 'node')}"


def module_frames(record: GraphRecord) -> tuple[list[Frame], list[int]]:
    """Return the frames of a graph, each after the one around it, and the frame of each node."""
    frames = _Frames(record)
    frames.add("", "", [module_tree(record)])
    return frames.frames, [frames.places[node.index] for node in record.nodes]


class _Frames:
    def __init__(self, record: GraphRecord) -> None:
        self.frames: list[Frame] = []
        self.places: dict[int, int] = {}
        self._phases, self._parts = frozenset(node_phases(record)), node_parts(record)
        self._is_measured = bool(_time(record.nodes))

    def add(
        self,
        name: str,
        around: str,
        branches: Sequence[Branch],
        parent: int | None = None,
        begin: float = 0.0,
        outer: int = 1,
    ) -> float:
        """Add the frame of equal modules and the frames inside it, and return its width.

        Args:
            name: Name of the modules.
            around: Path of the frame around it.
            branches: The modules.
            parent: Index of the frame around it.
            begin: Its place.
            outer: Number of equal modules that contain these.
        """
        groups = _groups(branches)
        while self._is_joined(name, branches) and len(groups) == 1:
            ((inner, branches),) = groups
            name, groups = f"{name}.{inner}", _groups(branches)
        at, nodes = len(self.frames), [node for branch in branches for node in branch.all_nodes]
        path = f"{around}.{name}" if around else name
        label = f"{name} ({len(branches)} x)" if len(branches) > outer else name
        time, part = _time(nodes), common_part(self._parts[node.index] for node in nodes)
        self.frames.append(Frame(label, path, parent, begin, 0.0, time, len(nodes), part))
        inside = 0.0
        for inner, group in groups:
            inside += self.add(inner, path, group, at, begin + inside, len(branches))
        for node in (node for branch in branches for node in branch.nodes):
            self.places[node.index] = at
        own = (time or 0.0) if self._is_measured else float(len(nodes))
        width = max(own, inside)  # a module inside a measured child graph may take longer
        self.frames[at] = replace(self.frames[at], width=width)
        return width

    def _is_joined(self, name: str, branches: Sequence[Branch]) -> bool:
        """Return True if a module that is the only content shares the frame, as in the tree."""
        is_phase = branches[0].path in self._phases
        return bool(name) and not is_phase and not any(branch.nodes for branch in branches)


def _groups(branches: Sequence[Branch]) -> list[tuple[str, list[Branch]]]:
    """Return the modules inside of equal modules by name, numbered modules by their content."""
    groups: dict[Hashable, list[Branch]] = {}
    for child in (child for branch in branches for child in branch.children):
        groups.setdefault(_likeness(child), []).append(child)
    numbers = {branch.name for group in groups.values() for branch in group if branch.is_layer}
    return [(_name(group, numbers), group) for group in groups.values()]


def _likeness(branch: Branch) -> Hashable:
    return branch.content if branch.is_layer else branch.name


def _name(group: Sequence[Branch], numbers: set[str]) -> str:
    names = list(dict.fromkeys(branch.name for branch in group))
    if len(names) == 1:
        return names[0]
    if len(names) == len(numbers):
        return "*"
    return ",".join(names if len(names) <= _NAMES else [*names[: _NAMES - 1], "..", names[-1]])


def _time(nodes: Sequence[Node]) -> float | None:
    time = total_us(nodes)
    return time if time is not None and math.isfinite(time) else None
