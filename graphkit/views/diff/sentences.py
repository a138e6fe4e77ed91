"""Changes of a graph's nodes as sentences."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from graphkit.records import FieldChange, Node, NodeChange, count_of
from graphkit.views.diff.nodes import NAME_FIELDS, moved
from graphkit.views.module_tree import any_layer

NOTHING_CHANGED = "nothing changed"
"""The sentence about graphs that have the same nodes."""
_MAX_VALUES = 3
"""Distinct changes of one field to spell out; if there are more, only changes of several nodes."""
_MAX_LENGTH = 40
"""Characters of a value to spell out; a struct with all of its pointers is longer."""
_ARGUMENT = "argument "
_Values = tuple[str, str]
"""A value before and after."""
_Change = tuple[str, _Values]
"""Name of a node, and a change of it."""
_MAX_KERNELS = 2
"""Kernels to name in a sentence that is about several."""
_SPLIT_K = re.compile(r"split_?k(?!v)", re.IGNORECASE)
"""Does not match the split over keys and values of attention."""


def sentences(
    added: Sequence[Node], removed: Sequence[Node], changed: Sequence[NodeChange]
) -> tuple[str, ...]:
    """Return the changes as sentences, other modules first; equal layers share one.

    ``argument_sentences`` returns the changes of arguments.
    """
    return (
        *_moved(changed),
        *_added_or_removed(added, "appeared in", "more"),
        *_added_or_removed(removed, "is gone from", "less"),
        *_replaced(changed),
        *_launches(changed),
    )


def argument_sentences(changed: Sequence[NodeChange]) -> tuple[str, ...]:
    """Return the changes of arguments as sentences, by kernel and argument."""
    by_field: dict[str, list[_Change]] = {}
    for node, change in _without_replaced(changed):
        if change.field.startswith(_ARGUMENT):
            field = f"{change.field} of {node.name}:"
            by_field.setdefault(field, []).append((node.name, _values(change)))
    return tuple(_spelled_out(by_field, lambda _names: ""))


def _moved(changed: Iterable[NodeChange]) -> Iterator[str]:
    """Yield a sentence per path that changed, without the names below it that did not."""
    counts = Counter[tuple[str, str]]()
    for change in (change for node in changed for change in node.changes):
        if change.field == "module":
            counts[moved(any_layer(change.before), any_layer(change.after))] += 1
    for (before, after), number in counts.items():
        moves = f"{before or 'none'} -> {after or 'none'}"
        yield f"module {moves} in {count_of(number, 'node')}"


def _added_or_removed(nodes: Sequence[Node], verb: str, more_or_less: str) -> Iterator[str]:
    groups: dict[tuple[str, str], list[str]] = {}
    for node in nodes:
        groups.setdefault((_title(node), any_layer(node.module)), []).append(node.module)
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
                key = (f"{noun}{change.before}", change.after, any_layer(node.module))
                groups.setdefault(key, []).append(node.module)
    for (before, after, _), modules in groups.items():
        count = count_of(len(modules), "node")
        yield f"{before} replaced by {after} in {_common_module(modules)} ({count})"


def _launches(changed: Iterable[NodeChange]) -> Iterator[str]:
    """Yield sentences by field, each with the kernels that it is about."""
    by_field: dict[str, list[_Change]] = {}
    for node, change in _without_replaced(changed):
        if not change.field.startswith(_ARGUMENT) and change.field != "module":
            field = "edge" if change.field.startswith("edge ") else change.field
            by_field.setdefault(field, []).append((node.name, _values(change)))
    return _spelled_out(by_field, lambda names: f" of {_kernels(names)}")


def _spelled_out(
    by_field: Mapping[str, Sequence[_Change]], of_kernels: Callable[[Sequence[str]], str]
) -> Iterator[str]:
    """Yield a sentence for each change of a field to show, and one that counts the others."""
    for field, changes in by_field.items():
        shown = dict(_values_to_show(Counter(values for _, values in changes)))
        for values, number in shown.items():
            kernels = of_kernels([name for name, change in changes if change == values])
            yield f"{field} {' -> '.join(values)} in {count_of(number, 'node')}{kernels}"
        rest = [name for name, change in changes if change not in shown]
        if rest:
            nodes = count_of(len(rest), "more node" if shown else "node")
            yield f"{field} differs in {nodes}{of_kernels(rest)}"


def _without_replaced(changed: Iterable[NodeChange]) -> Iterator[tuple[NodeChange, FieldChange]]:
    """Yield the changes of nodes; a replaced kernel implies its other changes."""
    for node in changed:
        if not any(change.field in NAME_FIELDS for change in node.changes):
            yield from ((node, change) for change in node.changes)


def _values(change: FieldChange) -> _Values:
    return change.before or "none", change.after or "none"


def _values_to_show(counts: Counter[_Values]) -> Iterator[tuple[_Values, int]]:
    fewest = 1 if len(counts) <= _MAX_VALUES else 2
    for values, number in counts.most_common(_MAX_VALUES):
        if number >= fewest and max(map(len, values)) <= _MAX_LENGTH:
            yield values, number


def _kernels(names: Iterable[str]) -> str:
    """Return the names, the most frequent first; all but two are counted."""
    first = [name for name, _ in Counter(names).most_common()]
    if len(first) > _MAX_KERNELS + 1:
        first[_MAX_KERNELS:] = [f"{len(first) - _MAX_KERNELS} more"]
    return " and ".join(filter(None, (", ".join(first[:-1]), *first[-1:])))


def _common_module(modules: Sequence[str]) -> str:
    return (modules[0] if len(set(modules)) == 1 else any_layer(modules[0])) or "no module"
