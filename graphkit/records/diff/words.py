"""What became of a graph's nodes, as sentences."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from graphkit.records.diff.nodes import NAMES, Change, NodeChange
from graphkit.records.graph import Node

NOTHING = "nothing changed"
_MOST_WAYS = 3
"""In which one field changed; of more those that several nodes share are said, others counted."""
_LONGEST = 40
"""A value, such as a struct with all of its pointers, that is too long for a sentence."""
_ARGUMENT = "argument "
_Way = tuple[str, str]
"""What a value was, and what it is."""
_SPLIT_K = re.compile(r"split_?k(?!v)", re.IGNORECASE)
"""Not the split over keys and values of attention."""
_NUMBER = re.compile(r"\b\d+\b")


def words_of(
    added: Sequence[Node], removed: Sequence[Node], changed: Sequence[NodeChange]
) -> tuple[str, ...]:
    """The sentences, nodes that came and went first; equal layers share one."""
    words = (
        *_came_or_went(added, "appeared in", "more"),
        *_came_or_went(removed, "is gone from", "less"),
        *_replaced(changed),
        *_other_changes(changed),
    )
    return words or (NOTHING,)


def count_of(number: int, noun: str = "node") -> str:
    """Such as ``1 node`` and ``12 nodes``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _came_or_went(nodes: Sequence[Node], verb: str, how: str) -> Iterator[str]:
    places: dict[tuple[str, str], list[str]] = {}
    for node in nodes:
        places.setdefault((_title(node), _layer(node.module)), []).append(node.module)
    for (title, _), modules in places.items():
        yield f"{title} {verb} {_place(modules)}: {count_of(len(modules))} {how}"


def _title(node: Node) -> str:
    if _SPLIT_K.search(node.name):
        return "split-K"
    is_said = node.short_name.startswith(node.kind)  # as of "memset of 64 bytes"
    return node.short_name if is_said else f"{node.kind} {node.short_name}"


def _replaced(changed: Iterable[NodeChange]) -> Iterator[str]:
    places: dict[tuple[str, str, str], list[str]] = {}
    for node in changed:
        for change in node.changes:
            if change.field in NAMES:
                noun = "kernel " if change.field == "kernel" else ""
                key = (f"{noun}{change.before}", change.after, _layer(node.module))
                places.setdefault(key, []).append(node.module)
    for (before, after, _), modules in places.items():
        many = count_of(len(modules))
        yield f"{before} replaced by {after} in {_place(modules)} ({many})"


def _other_changes(changed: Iterable[NodeChange]) -> Iterator[str]:
    """By field, arguments last. What comes with another kernel goes without saying."""
    ways: dict[str, Counter[_Way]] = {}
    for node in changed:
        if not any(change.field in NAMES for change in node.changes):
            for change in node.changes:
                what = (change.before or "none", change.after or "none")
                ways.setdefault(_field(node, change), Counter())[what] += 1
    for field, counts in sorted(ways.items(), key=lambda each: each[0].startswith(_ARGUMENT)):
        said = dict(_ways_to_say(counts))
        for (before, after), number in said.items():
            yield f"{field} {before} -> {after} in {count_of(number)}"
        rest = counts.total() - sum(said.values())
        if rest:
            yield f"{field} otherwise in {count_of(rest)}{' more' if said else ''}"


def _ways_to_say(counts: Counter[_Way]) -> Iterator[tuple[_Way, int]]:
    fewest = 1 if len(counts) <= _MOST_WAYS else 2
    for way, number in counts.most_common(_MOST_WAYS):
        if number >= fewest and max(map(len, way)) <= _LONGEST:
            yield way, number


def _field(node: NodeChange, change: Change) -> str:
    if change.field.startswith(_ARGUMENT):
        return f"{change.field} of {node.name}:"
    return "edge" if change.field.startswith("edge ") else change.field


def _layer(module: str) -> str:
    """The module's place in any layer."""
    return _NUMBER.sub("*", module)


def _place(modules: Sequence[str]) -> str:
    return (modules[0] if len(set(modules)) == 1 else _layer(modules[0])) or "no module"
