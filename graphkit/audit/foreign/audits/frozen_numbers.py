"""Check that the numbers that a graph captured are still what the program holds.

A program that has another graph for the other value is right: the number is then in the key under
which it keeps the graph, or a capture of the same line has the number that it holds now.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from types import FrameType
from typing import Any

from graphkit.audit.audit_log import Check
from graphkit.audit.finding_kinds import FindingKind
from graphkit.audit.foreign.audits.captured_numbers import CapturedNumber, is_same
from graphkit.audit.foreign.audits.followed_graph import FollowedGraph
from graphkit.audit.foreign.audits.held_numbers import MISSING, NUMBERS, running_frames
from graphkit.graphs.tracked_objects import find_referrers
from graphkit.records import count_of
from graphkit.runners.known_memory import is_a, own_attributes

_LEVELS = 4
"""Objects between a graph and the dict whose key tells what it is for."""
_MOST_REFERRERS = 64


def check_numbers(
    followed: FollowedGraph, graphs: Sequence[FollowedGraph], keys: GraphKeys, check: Check
) -> None:
    """Report the numbers that a graph captured and that the program has changed since.

    Call it on the thread that replays: it reads variables of running functions.
    """
    frames = running_frames()
    changed: dict[tuple[Any, ...], list[tuple[CapturedNumber, Any]]] = {}
    for number in followed.numbers:
        before, now = number.held.before, number.held.now(frames)
        derived = number.derive(now) if type(now) in NUMBERS else MISSING
        is_used = type(derived) not in NUMBERS or derived != number.value
        if is_same(before, now) or not is_used or _has_other_graph(followed, graphs, number, now):
            continue
        in_key = {(type(one), one) for one in keys.of(followed)}  # 1.0 is not the 1 of a size
        if in_key.isdisjoint((type(one), one) for one in (before, number.value)):
            use = number.node, number.op, number.argument, number.source
            changed.setdefault(use, []).append((number, now))
    for (number, now), *others in changed.values():
        held = number.held
        node = followed.record.nodes[number.node : number.node + 1]
        derived = "" if number.value == held.before else f", as {number.value!r}"
        shown = repr(now) if type(now) in NUMBERS else f"a {type(now).__name__}"
        check.report(
            FindingKind.FROZEN_VALUE,
            f"`{held.name}` was {held.before!r} at the capture and is {shown} now: the graph keeps "
            f"what it was{derived}, in argument `{number.argument}` of `{number.op}`.",
            node=node[0] if node else None,
            source=number.source,
            names=(held.name, *(other.held.name for other, _ in others)),
            before=repr(held.before),
            after=shown,
            cause=held.name,
        )
    check.text = f"{count_of(len(followed.numbers), 'number')} of the host in its arguments"


def check_equal_keys(
    followed: FollowedGraph, graphs: Iterable[FollowedGraph], keys: GraphKeys, check: Check
) -> None:
    """Report that a live graph of the same line and key was captured with other arguments."""
    for other in graphs:
        is_alike = other.captured_at == followed.captured_at and [
            name for name, _ in other.calls
        ] == [name for name, _ in followed.calls]
        if other is followed or not is_alike or other.calls == followed.calls:
            continue
        key = keys.of(followed)
        if not key or key != keys.of(other):
            continue
        name, before, now = next(
            (name, was, now)
            for (name, was), (_, now) in zip(other.calls, followed.calls, strict=True)
            if was != now
        )
        check.report(
            FindingKind.FROZEN_VALUE,
            f"two graphs that this line captured for one key, {sorted(key)}, differ: `{name}` has "
            f"{list(before)} in one and {list(now)} in the other.",
            severity="warning",
            before=str(list(before)),
            after=str(list(now)),
            cause=f"key of {followed.captured_at}",
        )
        return


def _has_other_graph(
    followed: FollowedGraph, graphs: Iterable[FollowedGraph], number: CapturedNumber, now: Any
) -> bool:
    """Return whether the same line captured a live graph with the number that is held now."""
    return any(
        other.is_alive
        and other.captured_at == followed.captured_at
        and any(
            its.held.name == number.held.name and is_same(its.held.before, now)
            for its in other.numbers
        )
        for other in graphs
        if other is not followed
    )


class GraphKeys:
    """The numbers in the keys under which a program keeps its graphs.

    They are searched when they are asked for, in about 0.1 s for a large process.
    """

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[Any, frozenset[Any]] = weakref.WeakKeyDictionary()

    def of(self, followed: FollowedGraph) -> frozenset[Any]:
        """Return the numbers in the keys of a graph; empty if no dict holds it by a number."""
        graph = followed.graph()
        if graph is None:
            return frozenset()
        if graph not in self._known:
            self._known[graph] = frozenset(_numbers_of_keys(graph))
        return self._known[graph]


def _numbers_of_keys(graph: Any) -> Iterator[Any]:
    held, seen = [graph], {id(graph)}
    for _ in range(_LEVELS):
        ids = set(map(id, held))
        # Variables of functions hold everything that runs.
        outer = [
            one
            for one in find_referrers(held)
            if id(one) not in seen and not isinstance(one, FrameType) and one is not held
        ]
        for one in outer:
            if is_a(one, dict):
                for key, value in list(dict.items(one)):
                    if id(value) in ids:
                        yield from _numbers_in(key)
        seen |= set(map(id, outer))
        held = outer
        if not held or len(held) > _MOST_REFERRERS:
            return


def _numbers_in(key: Any) -> Iterator[Any]:
    """Yield the numbers of a key: a number, a tuple, or an object with fields."""
    if type(key) in NUMBERS:
        yield key
    elif is_a(key, (tuple, frozenset)):
        for part in key:
            yield from _numbers_in(part)
    elif is_dataclass(key) and not isinstance(key, type):
        for one in fields(key):
            yield from _numbers_in(getattr(key, one.name))
    elif not is_a(key, str):
        yield from filter(lambda value: type(value) in NUMBERS, own_attributes(key).values())
