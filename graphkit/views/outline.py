"""Visible rows of a tree of rows, from top to bottom."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from graphkit.views.pages.page_model import Column, Row

Order = Callable[[Sequence[Row]], Sequence[Row]]
"""Sorts the rows of one parent."""
_Test = Callable[[Row], bool]


@dataclass(frozen=True, slots=True)
class Line:
    """A visible row.

    Attributes:
        row: The row.
        parents: Keys of the rows around it, outermost first.
    """

    row: Row
    parents: tuple[str, ...]


def flatten(
    rows: Sequence[Row],
    *,
    is_open: _Test = lambda _row: True,
    is_kept: _Test = lambda _row: True,
    order: Order = lambda rows: rows,
    parents: tuple[str, ...] = (),
) -> Iterator[Line]:
    """Yield the rows, and after each open one the rows inside it.

    Args:
        rows: The rows of one parent.
        is_open: True for a row whose children are visible.
        is_kept: True for a row that is visible at all.
        order: Sorts the rows of each parent.
        parents: Keys of the rows around these, outermost first.
    """
    for row in order(rows):
        if is_kept(row):
            yield Line(row, parents)
            if row.make_children and is_open(row):
                yield from flatten(
                    row.children,
                    is_open=is_open,
                    is_kept=is_kept,
                    order=order,
                    parents=(*parents, row.key),
                )


def keys_around(lines: Iterable[Line]) -> frozenset[str]:
    """Return the keys of all rows that contain these."""
    return frozenset(key for line in lines for key in line.parents)


def order_by(columns: Sequence[Column], name: str, is_reversed: bool) -> Order:
    """Return the order by a column's values, or the page's own order for an unknown name.

    Numbers descend and text ascends unless reversed; rows without a value stay last.
    """
    index = next((at for at, column in enumerate(columns) if column.name == name), None)
    if index is None:
        return (lambda rows: rows[::-1]) if is_reversed else (lambda rows: rows)
    at, descending = index, columns[index].is_number != is_reversed

    def order(rows: Sequence[Row]) -> Sequence[Row]:
        with_value = [row for row in rows if row.values[at] is not None]
        with_value.sort(key=lambda row: row.values[at], reverse=descending)
        return [*with_value, *(row for row in rows if row.values[at] is None)]

    return order
