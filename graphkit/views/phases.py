"""Phases of a whole step, as the outermost modules of its tree."""

from __future__ import annotations

from graphkit.records import GraphRecord, Node
from graphkit.views.module_tree import Branch, module_tree, nodes_in_modules, tree_of

PHASES = ("draft", "build", "verify", "accept", "extend")
"""Scopes of ``graphkit.step`` that a whole step consists of."""
_STEP = "STEP"


def step_tree(record: GraphRecord) -> Branch:
    """Return the tree of a graph; in a whole step, each phase contains the modules that it runs."""
    phases = phases_of(record)
    if not any(phases):
        return module_tree(record)
    pairs = zip(phases, nodes_in_modules(record), strict=True)
    return tree_of([((*filter(None, [phase]), *names), node) for phase, (names, node) in pairs])


def phases_of(record: GraphRecord) -> list[str]:
    """Return the phase of each node; empty outside of phases, and in graphs of other modes."""
    phases: dict[int, str] = {}
    for node in record.nodes:
        inherited = "" if node.parent is None else phases.get(node.parent, "")
        phases[node.index] = (_phase(node) if record.mode == _STEP else "") or inherited
    return [phases[node.index] for node in record.nodes]


def _phase(node: Node) -> str:
    """Return the outermost scope that is a phase. Trees are built inside of ``draft``."""
    names = node.scope.split("/")
    at = next((at for at, name in enumerate(names) if name in PHASES), None)
    if at is None:
        return ""
    return "build" if names[at + 1 : at + 2] == ["build"] else names[at]
