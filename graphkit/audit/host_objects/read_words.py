"""Whether code reads what an attribute or a variable holds, by its syntax tree."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Sequence
from contextlib import suppress
from types import FunctionType

_WRITING = frozenset(
    {"append", "appendleft", "extend", "insert", "clear", "update", "setdefault", "add"}
)
"""Methods of collections whose call reads nothing that was left."""


def reads(functions: Sequence[FunctionType], word: str) -> bool:
    """Return whether code reads what an attribute or a variable holds, apart from adding to it.

    Args:
        functions: The forward, then other functions; those without a source are not searched.
            Attributes of the forward's inputs, by the name of its parameter, do not count.
        word: The name.
    """
    inputs: set[str] = set()
    for function in functions:
        with suppress(OSError, TypeError, SyntaxError, ValueError):
            inputs = inputs or set(inspect.signature(function).parameters) - {"self"}
            tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
            if _reads(tree, word, inputs):
                return True
    return False


def _reads(tree: ast.AST, word: str, inputs: set[str]) -> bool:
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(tree):
        is_attribute = isinstance(node, ast.Attribute) and node.attr == word
        is_name = isinstance(node, ast.Name) and node.id == word
        if not (is_attribute or is_name) or not isinstance(node.ctx, ast.Load):  # type: ignore[attr-defined]
            continue
        base = getattr(node, "value", None)
        if isinstance(base, ast.Name) and base.id in inputs:
            continue
        if not _is_written(node, parents):
            return True
    return False


def _is_written(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> bool:
    """Return whether an expression is the target of a store, or of a call that adds to it."""
    parent = parents.get(node)
    while isinstance(parent, ast.Subscript) and parent.value is node:
        if not isinstance(parent.ctx, ast.Load):
            return True
        node, parent = parent, parents.get(parent)
    if isinstance(parent, ast.Attribute) and parent.value is node:
        return not isinstance(parent.ctx, ast.Load) or parent.attr in _WRITING
    return False
