"""A graph's nodes as a tree of the modules whose forward made them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from graphkit.records import GraphRecord, Node

NodeInModules = tuple[tuple[str, ...], Node]
"""The names of the modules around a node, outermost first, and the node."""


@dataclass(frozen=True)
class Branch:
    """A module, and the nodes that its forward made.

    Attributes:
        path: Dotted, as in ``Node.module``; empty for the root.
        name: Last part of the path.
        children: Modules inside it that made nodes, by their first node.
        nodes: Its own nodes, in record order.
    """

    path: str
    name: str
    children: tuple[Branch, ...]
    nodes: tuple[Node, ...]

    @property
    def index(self) -> int:
        """Index of its first node."""
        return self.all_nodes[0].index

    @property
    def parts(self) -> list[Branch | Node]:
        """Its modules and its own nodes, in order of creation."""
        return sorted([*self.children, *self.nodes], key=lambda part: part.index)

    @cached_property
    def all_nodes(self) -> tuple[Node, ...]:
        """Its own nodes and those of all modules inside it, in record order."""
        below = (node for child in self.children for node in child.all_nodes)
        return tuple(sorted((*self.nodes, *below), key=lambda node: node.index))

    @property
    def num_nodes(self) -> int:
        """Number of nodes, those of all modules inside it included."""
        return len(self.all_nodes)

    @cached_property
    def duration_us(self) -> float | None:
        """Sum of the nodes' durations on the device; ``None`` if none was measured."""
        return duration_of(self.all_nodes)


def shortened(branch: Branch) -> tuple[str, Branch]:
    """Join a module with the modules that are each the only content of the one around it.

    Returns:
        The joined name, and the innermost of those modules.
    """
    name = branch.name
    while not branch.nodes and len(branch.children) == 1:
        (branch,) = branch.children
        name = f"{name}.{branch.name}"
    return name, branch


def module_tree(record: GraphRecord) -> Branch:
    """Return the tree of a graph."""
    return tree_of(nodes_in_modules(record))


def tree_of(nodes: Sequence[NodeInModules]) -> Branch:
    """Return the tree of nodes."""
    return _branch(nodes, ())


def nodes_in_modules(record: GraphRecord) -> list[NodeInModules]:
    """Return each node with the names of the modules around it, outermost first.

    A node without a module belongs to the root; inside a child graph or body, to the module of
    the node that contains it.
    """
    modules: dict[int, str] = {}
    for node in record.nodes:
        inherited = "" if node.parent is None else modules.get(node.parent, "")
        modules[node.index] = node.module or inherited
    return [(tuple(filter(None, modules[n.index].split("."))), n) for n in record.nodes]


def duration_of(nodes: Iterable[Node]) -> float | None:
    """Return the sum of the nodes' durations, in us; ``None`` if none was measured.

    A node inside another measured node, such as a child graph, is not counted again.
    """
    known = {node.index: node for node in nodes}
    times = [n.duration_us for n in known.values() if not _is_inside_measured(n, known)]
    measured = [time for time in times if time is not None]
    return sum(measured) if measured else None


def _branch(nodes: Sequence[NodeInModules], names: tuple[str, ...]) -> Branch:
    depth = len(names)
    inside: dict[str, list[NodeInModules]] = {}
    for modules, node in nodes:
        if len(modules) > depth:
            inside.setdefault(modules[depth], []).append((modules, node))
    return Branch(
        path=".".join(names),
        name=names[-1] if names else "",
        children=tuple(_branch(each, (*names, name)) for name, each in inside.items()),
        nodes=tuple(node for modules, node in nodes if len(modules) == depth),
    )


def _is_inside_measured(node: Node, known: Mapping[int, Node]) -> bool:
    if node.parent is None or node.parent >= node.index:  # a damaged record may have the latter
        return False
    holder = known.get(node.parent)
    return holder is not None and (
        holder.duration_us is not None or _is_inside_measured(holder, known)
    )
