"""Changes of a graph's nodes as sentences."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from graphkit.diff.nodes import NAME_FIELDS
from graphkit.records import FieldChange, Node, NodeChange, count_of

NOTHING_CHANGED = "nothing changed"
_MAX_VALUES = 3
"""Distinct changes of one field to spell out; if there are more, only those of several nodes."""
_MAX_LENGTH = 40
"""Characters of a value to spell out; a struct with all of its pointers is longer."""
_ARGUMENT = "argument "
_Values = tuple[str, str]
"""A value before and after."""
_SPLIT_K = re.compile(r"split_?k(?!v)", re.IGNORECASE)
"""Does not match the split over keys and values of attention."""
_NUMBER = re.compile(r"\b\d+\b")


def sentences(
    added: Sequence[Node],
    removed: Sequence[Node],
    changed: Sequence[NodeChange],
    renamed: Mapping[str, str],
) -> tuple[str, ...]:
    """Return the changes as sentences, renamed modules first; equal layers share one."""
    found = (
        *_renamed(renamed),
        *_added_or_removed(added, "appeared in", "more"),
        *_added_or_removed(removed, "is gone from", "less"),
        *_replaced(changed),
        *_other_changes(changed),
    )
    return found or (NOTHING_CHANGED,)


def _renamed(renamed: Mapping[str, str]) -> Iterator[str]:
    pairs = ((_any_layer(before), _any_layer(after)) for before, after in renamed.items())
    for before, after in dict.fromkeys(pairs):
        yield f"module renamed: {before} -> {after}"


def _added_or_removed(nodes: Sequence[Node], verb: str, more_or_less: str) -> Iterator[str]:
    groups: dict[tuple[str, str], list[str]] = {}
    for node in nodes:
        groups.setdefault((_title(node), _any_layer(node.module)), []).append(node.module)
    for (title, _), modules in groups.items():
        count = count_of(len(modules), "node")
        yield f"{title} {verb} {_common_module(modules)}: {count} {more_or_less}"


def _title(node: Node) -> str:
    if _SPLIT_K.search(node.name):
        return "split-K"
    names_kind = node.short_name.startswith(node.kind)  # such as "memset of 64 bytes"
    return node.short_name if names_kind else f"{node.kind} {node.short_name}"


def _replaced(changed: Iterable[NodeChange]) -> Iterator[str]:
    groups: dict[tuple[str, str, str], list[str]] = {}
    for node in changed:
        for change in node.changes:
            if change.field in NAME_FIELDS:
                noun = "kernel " if change.field == "kernel" else ""
                key = (f"{noun}{change.before}", change.after, _any_layer(node.module))
                groups.setdefault(key, []).append(node.module)
    for (before, after, _), modules in groups.items():
        count = count_of(len(modules), "node")
        yield f"{before} replaced by {after} in {_common_module(modules)} ({count})"


def _other_changes(changed: Iterable[NodeChange]) -> Iterator[str]:
    """Yield sentences by field, arguments last; a replaced kernel implies its other changes."""
    by_field: dict[str, Counter[_Values]] = {}
    for node in changed:
        if not any(change.field in NAME_FIELDS for change in node.changes):
            for change in node.changes:
                values = (change.before or "none", change.after or "none")
                by_field.setdefault(_field(node, change), Counter())[values] += 1
    for field, counts in sorted(by_field.items(), key=lambda item: item[0].startswith(_ARGUMENT)):
        shown = dict(_values_to_show(counts))
        for (before, after), number in shown.items():
            yield f"{field} {before} -> {after} in {count_of(number, 'node')}"
        rest = counts.total() - sum(shown.values())
        if rest:
            more = "more " if shown else ""
            yield f"{field} differs in {rest:,} {more}{'node' if rest == 1 else 'nodes'}"


def _values_to_show(counts: Counter[_Values]) -> Iterator[tuple[_Values, int]]:
    fewest = 1 if len(counts) <= _MAX_VALUES else 2
    for values, number in counts.most_common(_MAX_VALUES):
        if number >= fewest and max(map(len, values)) <= _MAX_LENGTH:
            yield values, number


def _field(node: NodeChange, change: FieldChange) -> str:
    if change.field.startswith(_ARGUMENT):
        return f"{change.field} of {node.name}:"
    return "edge" if change.field.startswith("edge ") else change.field


def _any_layer(module: str) -> str:
    """Return a module's path with ``*`` for each number."""
    return _NUMBER.sub("*", module)


def _common_module(modules: Sequence[str]) -> str:
    return (modules[0] if len(set(modules)) == 1 else _any_layer(modules[0])) or "no module"
