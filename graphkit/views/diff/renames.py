"""Modules that have another path in the second of two graphs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from graphkit.records import Argument, Node, Pointer
from graphkit.views.diff.nodes import NodePair, pair_nodes

Renames = Mapping[str, str]
"""Paths after by paths before. They apply to all modules and weights below a path."""


def pair_across_renames(
    before: Sequence[Node], after: Sequence[Node], known: Renames
) -> tuple[list[NodePair], Renames]:
    """Pair the nodes that both graphs contain, and return the modules that were renamed or moved.

    The first node of a pair has the paths of the graph after.

    Args:
        before: Nodes of a graph.
        after: Nodes of the graph to compare with it.
        known: Renames of modules outside of these graphs, whose weights the graphs may read.
    """
    pairs = pair_nodes(before, after)
    modules = _renamed_modules(before, after, pairs)
    renames = _outermost(modules, _paths(before), _paths(after))
    if not renames and not known:
        return pairs, renames
    renaming = _Renaming(renames, {**known, **renames}, after)
    return pair_nodes([renaming.node(node) for node in before], after), renames


def _renamed_modules(
    before: Sequence[Node], after: Sequence[Node], pairs: Sequence[NodePair]
) -> dict[str, str]:
    """Return the modules of one graph alone whose nodes are mostly paired with one other module."""
    left, right = (Counter(node.module for node in nodes) for nodes in (before, after))
    renamed = {}
    for (old, new), count in Counter((one.module, two.module) for one, two in pairs).items():
        is_new = old not in right and new not in left
        if is_new and old and new and 2 * count > max(left[old], right[new]):
            renamed[old] = new
    return renamed


def _outermost(modules: Mapping[str, str], before: set[str], after: set[str]) -> dict[str, str]:
    """Return the renames without the names below them that are the same in both graphs."""
    outer = {both: _without_equal_names(*both, before, after) for both in modules.items()}
    targets = Counter(old for old, _ in set(outer.values()))
    return dict(around if targets[around[0]] == 1 else both for both, around in outer.items())


def _without_equal_names(old: str, new: str, before: set[str], after: set[str]) -> tuple[str, str]:
    """Drop equal last names while the paths around them are of one graph alone."""
    old_parent, _, old_name = old.rpartition(".")
    new_parent, _, new_name = new.rpartition(".")
    if old_name != new_name or old_parent in after or new_parent in before:
        return old, new
    return _without_equal_names(old_parent, new_parent, before, after)


def _paths(nodes: Sequence[Node]) -> set[str]:
    """Return the paths of all modules and of those around them, the root ``""`` included."""
    paths = {""}
    for module in {node.module for node in nodes}:
        path = module
        while path not in paths:
            paths.add(path)
            path = path.rpartition(".")[0]
    return paths


class _Renaming:
    """Gives nodes the paths after, and their pointers the names that the graph after has."""

    def __init__(self, modules: Renames, weights: Renames, after: Sequence[Node]) -> None:
        self._modules = modules
        # Weights move with modules that have no nodes, too.
        self._weights = {**dict(_parent_renames(weights)), **weights}
        arguments = (argument for node in after for argument in node.arguments)
        self._names = {_memory(pointer) for arg in arguments for pointer in arg.pointers}

    def node(self, node: Node) -> Node:
        module = _new_path(node.module, self._modules)
        arguments = tuple(map(self._argument, node.arguments))
        is_same = module == node.module and arguments == node.arguments
        return node if is_same else replace(node, module=module, arguments=arguments)

    def _argument(self, argument: Argument) -> Argument:
        pointers = tuple(map(self._pointer, argument.pointers))
        text = argument.text
        for old, new in zip(argument.pointers, pointers, strict=True):
            text = text.replace(old.name, new.name)
        is_same = pointers == argument.pointers
        return argument if is_same else replace(argument, text=text, pointers=pointers)

    def _pointer(self, pointer: Pointer) -> Pointer:
        renamed = replace(pointer, name=_new_path(pointer.name, self._weights))
        is_name_of_after = _memory(renamed) in self._names and _memory(pointer) not in self._names
        return renamed if is_name_of_after else pointer


def _parent_renames(renames: Renames) -> Iterator[tuple[str, str]]:
    """Yield the paths around modules that moved and kept their names."""
    for old, new in renames.items():
        (old_parent, _, old_name), (new_parent, _, new_name) = (
            path.rpartition(".") for path in (old, new)
        )
        if old_name == new_name:
            yield old_parent, new_parent


def _memory(pointer: Pointer) -> tuple[str, str]:
    return pointer.memory, pointer.name.partition("+")[0]


def _new_path(path: str, renames: Renames) -> str:
    """Return a path with the longest renamed path at its beginning replaced."""
    names = path.split(".")
    for end in range(len(names), -1, -1):
        around = ".".join(names[:end])
        if around in renames:
            return ".".join(filter(None, [renames[around], *names[end:]]))
    return path
