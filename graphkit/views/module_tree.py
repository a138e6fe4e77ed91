"""Nodes of a graph as a tree of phases and modules, and the part and the sources of nodes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from graphkit.records import GraphRecord, Node, count_of

NodeInModules = tuple[tuple[str, ...], Node]
"""The names of the phase and the modules around a node, outermost first, and the node."""
PHASES = ("draft", "build", "verify", "accept", "extend")
"""Scopes of ``graphkit.engine.step`` that a whole step consists of."""
_STEP = "STEP"
_FILE_AND_LINE = re.compile(r"[^/\\]+\.py:\d+")
_MOST_LINES = 2
"""Lines to name in a sentence; more are counted."""
_RUNNER_PARTS = {"(refresh)": "refresh", "(metadata)": "metadata"}
_MODEL_PARTS = {
    "norm": re.compile(r"norm|^ln_", re.IGNORECASE),  # first: post_attention_layernorm is a norm
    "attn": re.compile(r"attn|attention|mixer|mamba", re.IGNORECASE),
    "mlp": re.compile(r"mlp|ffn|feed_?forward|moe|expert", re.IGNORECASE),
    "embed": re.compile(r"embed|rotary|rope|^w[tp]e$", re.IGNORECASE),
    "head": re.compile(r"head|logits", re.IGNORECASE),
}


@dataclass(frozen=True)
class Branch:
    """A phase or a module, and the nodes that its forward made.

    Attributes:
        path: Dotted, as in ``Node.module``, after the phase if it has one; empty for the root.
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
        """All nodes inside it, its own and its modules', in record order."""
        below = (node for child in self.children for node in child.all_nodes)
        return tuple(sorted((*self.nodes, *below), key=lambda node: node.index))

    @cached_property
    def duration_us(self) -> float | None:
        """Sum of the nodes' durations on the device; ``None`` if none was measured."""
        return total_us(self.all_nodes)


def module_tree(record: GraphRecord) -> Branch:
    """Return the tree of a graph; in a whole step, each phase contains the modules that it runs."""
    return _branch(nodes_in_modules(record), ())


def nodes_in_modules(record: GraphRecord) -> list[NodeInModules]:
    """Return each node with the names of the phase and the modules around it, outermost first.

    A node without a module belongs to the root; inside a child graph or body, to the module of
    the node that contains it.
    """
    modules = _or_around(record, lambda node: node.module)
    around = zip(node_phases(record), modules, record.nodes, strict=True)
    return [(tuple(filter(None, (p, *module.split(".")))), node) for p, module, node in around]


def node_phases(record: GraphRecord) -> list[str]:
    """Return the phase of each node; empty outside of phases, and in graphs of other modes."""
    return _or_around(record, _phase if record.mode == _STEP else lambda _node: "")


def _or_around(record: GraphRecord, name_of: Callable[[Node], str]) -> list[str]:
    """Return the name of each node, or of the node around it if it has none."""
    names: dict[int, str] = {}
    for node in record.nodes:
        around = "" if node.parent is None else names.get(node.parent, "")
        names[node.index] = name_of(node) or around
    return [names[node.index] for node in record.nodes]


def shortened(branch: Branch) -> tuple[str, Branch]:
    """Join a module with those that are each the only content of the one around it.

    Returns the joined name, and the innermost module.
    """
    name = branch.name
    while not branch.nodes and len(branch.children) == 1:
        (branch,) = branch.children
        name = f"{name}.{branch.name}"
    return name, branch


def any_layer(module: str) -> str:
    """Return the path of a module with ``*`` for each number, which is equal for all layers."""
    return ".".join("*" if name.isdecimal() else name for name in module.split("."))


def total_us(nodes: Iterable[Node]) -> float | None:
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
        children=tuple(_branch(pairs, (*names, name)) for name, pairs in inside.items()),
        nodes=tuple(node for modules, node in nodes if len(modules) == depth),
    )


def _phase(node: Node) -> str:
    """Return the outermost scope that is a phase. Trees are built inside of ``draft``."""
    names = node.scope.split("/")
    at = next((at for at, name in enumerate(names) if name in PHASES), None)
    if at is None:
        return ""
    return "build" if names[at + 1 : at + 2] == ["build"] else names[at]


def _is_inside_measured(node: Node, known: Mapping[int, Node]) -> bool:
    if node.parent is None or node.parent >= node.index:  # a damaged record may have the latter
        return False
    holder = known.get(node.parent)
    return holder is not None and (
        holder.duration_us is not None or _is_inside_measured(holder, known)
    )


def node_parts(record: GraphRecord) -> dict[int, str]:
    """Return each node's part by its index: the phase, or else of the runner or of the model.

    The outermost module whose name says what it is decides on the part of a model, so that a norm
    inside attention counts as attention. Empty for nodes of no part.
    """
    pairs = zip(node_phases(record), nodes_in_modules(record), strict=True)
    return {
        node.index: phase or next(filter(None, map(_part, names)), "")
        for phase, (names, node) in pairs
    }


@lru_cache(maxsize=1024)  # most nodes share the names of their modules
def _part(name: str) -> str:
    of_model = (part for part, pattern in _MODEL_PARTS.items() if pattern.search(name))
    return _RUNNER_PARTS.get(name) or next(of_model, "")


def source_cell(nodes: Iterable[Node]) -> str:
    """Return file and line of the most expensive source, and the number of others.

    Such as ``layers.py:110`` or ``model.py:129 +8``; empty if no node has a source.
    """
    first, *others = _by_time(nodes) or [""]
    match = _FILE_AND_LINE.search(first)
    name = match[0] if match else first
    return f"{name} +{len(others)}" if others else name


def source_sentence(nodes: Iterable[Node]) -> str:
    """Return the most expensive sources with their functions; empty if no node has a source."""
    lines = _by_time(nodes)
    others = len(lines) - _MOST_LINES
    more = [f"and {count_of(others, 'more line')}"] if others > 0 else []
    return ", ".join([*lines[:_MOST_LINES], *more])


def _by_time(nodes: Iterable[Node]) -> list[str]:
    times: dict[str, float] = {}
    for node in nodes:
        if node.source:
            times[node.source] = times.get(node.source, 0.0) + (node.duration_us or 0.0)
    return sorted(times, key=lambda line: -times[line])
