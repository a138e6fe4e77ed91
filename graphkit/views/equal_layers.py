"""Layers of a large graph that repeat an earlier one: a picture shows their nodes once."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from graphkit.views.module_tree import Branch

_LARGE = 500
"""Number of nodes from which on a graph is too large for a picture of each node."""


def equal_layers(root: Branch) -> dict[str, str]:
    """Return the layers that have the nodes of an earlier layer, by path the path of that one.

    A layer is a module whose name is a number, such as ``layers.3``. Its nodes are equal if they
    are the same kernels with the same grids in the same modules.

    Args:
        root: Tree of a graph. One of fewer than 500 nodes has no such layers.
    """
    return dict(_equal_layers(root)) if root.num_nodes >= _LARGE else {}


def _equal_layers(branch: Branch) -> Iterator[tuple[str, str]]:
    first: dict[Hashable, str] = {}
    for child in branch.children:
        same = first.setdefault(_shape(child), child.path) if child.name.isdigit() else child.path
        if same == child.path:
            yield from _equal_layers(child)
        else:
            yield child.path, same


def _shape(branch: Branch) -> Hashable:
    return tuple(
        (part.name, _shape(part))
        if isinstance(part, Branch)
        else (part.kind, part.short_name, part.grid)
        for part in branch.parts
    )
