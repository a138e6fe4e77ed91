"""Items to rows: the open ones from top to bottom, sorted among their own kind."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass

from graphkit.views.pages.page import Column, Item

Order = Callable[[Sequence[Item]], Sequence[Item]]
"""Puts the items that lie side by side in order."""


@dataclass(frozen=True, slots=True)
class Line:
    """One row.

    Attributes:
        item: What it shows.
        parents: Keys of the items that it is in, outermost first.
    """

    item: Item
    parents: tuple[str, ...]


class Everything:
    """A container that holds whatever is asked for."""

    def __contains__(self, _key: object) -> bool:
        return True


EVERYTHING = Everything()


def flatten(
    items: Sequence[Item],
    *,
    opened: Container[str] = EVERYTHING,
    kept: Container[str] = EVERYTHING,
    order: Order = lambda items: items,
    parents: tuple[str, ...] = (),
) -> Iterator[Line]:
    """The rows of these items, and below each open one those of the items in it.

    Args:
        items: Side by side.
        opened: Keys of the open items.
        kept: Keys of the items that are shown at all.
        order: Sorts what lies side by side.
        parents: Keys of the items around them.
    """
    for item in order(items):
        if item.key in kept:
            yield Line(item, parents)
            if item.inside and item.key in opened:
                yield from flatten(
                    item.children,
                    opened=opened,
                    kept=kept,
                    order=order,
                    parents=(*parents, item.key),
                )


def keys_around(lines: Iterable[Line]) -> frozenset[str]:
    """Keys of the items that these rows are in."""
    return frozenset(key for line in lines for key in line.parents)


def by_column(columns: Sequence[Column], name: str, is_reversed: bool) -> Order:
    """Order by a column's values, or as it is for a name that no column has.

    Numbers go from the largest down, text from a to z; items without a value stay last.
    """
    at = next((at for at, column in enumerate(columns) if column.name == name), None)
    if at is None:
        return (lambda items: items[::-1]) if is_reversed else (lambda items: items)
    place, descending = at, columns[at].is_number != is_reversed

    def order(items: Sequence[Item]) -> Sequence[Item]:
        with_value = [item for item in items if item.values[place] is not None]
        with_value.sort(key=lambda item: item.values[place], reverse=descending)
        return [*with_value, *(item for item in items if item.values[place] is None)]

    return order
