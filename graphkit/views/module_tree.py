"""A graph's nodes as the tree of the modules whose forwards made them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from graphkit.records import GraphRecord, Node

Placed = tuple[tuple[str, ...], Node]
"""The names on the way from the root to a node's module, and the node."""


@dataclass(frozen=True)
class Branch:
    """A module, and what its forward put into the graph.

    Attributes:
        path: Dotted, as in ``Node.module``; empty for the root.
        name: The path's last part.
        children: Modules inside it that made nodes, by their first node.
        nodes: Its own, in record order.
    """

    path: str
    name: str
    children: tuple[Branch, ...]
    nodes: tuple[Node, ...]

    @property
    def index(self) -> int:
        """That of its first node."""
        return self.all_nodes[0].index

    @property
    def parts(self) -> list[Branch | Node]:
        """Its modules and its own nodes, in order of creation."""
        return sorted([*self.children, *self.nodes], key=lambda part: part.index)

    @cached_property
    def all_nodes(self) -> tuple[Node, ...]:
        """Its own nodes and those of all modules inside, in record order."""
        below = (node for child in self.children for node in child.all_nodes)
        return tuple(sorted((*self.nodes, *below), key=lambda node: node.index))

    @property
    def num_nodes(self) -> int:
        """How many those are."""
        return len(self.all_nodes)

    @cached_property
    def duration_us(self) -> float | None:
        """Their time on the device, added up; ``None`` if none of them was measured."""
        return duration_of(self.all_nodes)


def shortened(branch: Branch) -> tuple[str, Branch]:
    """The name for a line that a module shares with the one that is all it holds, and the inner."""
    name = branch.name
    while not branch.nodes and len(branch.children) == 1:
        (branch,) = branch.children
        name = f"{name}.{branch.name}"
    return name, branch


def module_tree(record: GraphRecord) -> Branch:
    """The tree of a graph."""
    return _branch(placed(record), ())


def placed(record: GraphRecord) -> list[Placed]:
    """Each node with the names of the modules around it, outermost first.

    A node without a module stands at the root, or, inside a child graph or body, in the module of
    the node that holds it.
    """
    modules: dict[int, str] = {}
    for node in record.nodes:
        holder = "" if node.parent is None else modules.get(node.parent, "")
        modules[node.index] = node.module or holder
    return [(tuple(filter(None, modules[n.index].split("."))), n) for n in record.nodes]


def duration_of(nodes: Iterable[Node]) -> float | None:
    """The nodes' time on the device, added up, in us; ``None`` if none of them was measured.

    A node that was measured as part of another one of them, as in a child graph, adds nothing.
    """
    known = {node.index: node for node in nodes}
    times = [n.duration_us for n in known.values() if not _is_inside_measured(n, known)]
    measured = [time for time in times if time is not None]
    return sum(measured) if measured else None


def _branch(placed: list[Placed], names: tuple[str, ...]) -> Branch:
    depth = len(names)
    inside: dict[str, list[Placed]] = {}
    for where, node in placed:
        if len(where) > depth:
            inside.setdefault(where[depth], []).append((where, node))
    return Branch(
        path=".".join(names),
        name=names[-1] if names else "",
        children=tuple(_branch(each, (*names, name)) for name, each in inside.items()),
        nodes=tuple(node for where, node in placed if len(where) == depth),
    )


def _is_inside_measured(node: Node, known: Mapping[int, Node]) -> bool:
    if node.parent is None or node.parent >= node.index:  # only a torn record has the latter
        return False
    holder = known.get(node.parent)
    return holder is not None and (
        holder.duration_us is not None or _is_inside_measured(holder, known)
    )
