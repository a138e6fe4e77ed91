"""A page's rows as lines of text: which columns there is room for, and how wide they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len

from graphkit.tui.clip import clip
from graphkit.tui.lines import Line
from graphkit.tui.listing import Listing
from graphkit.views.pages.page import Column

GAP = 2
"""Cells between two columns."""


@dataclass(frozen=True, slots=True)
class Place:
    """A column that is shown.

    Attributes:
        at: Its place among the page's columns.
        width: Its cells.
    """

    at: int
    width: int


def fit(columns: Sequence[Column], wanted: Sequence[int], room: int) -> tuple[Place, ...]:
    """The columns that so many cells have room for, in order.

    Args:
        columns: All of them.
        wanted: The widest text of each.
        room: Cells of a line; where those that always stay need more, the widest gets less.
    """
    pairs = zip(columns, wanted, strict=True)
    widths = dict(enumerate(column.least or min(want, column.most) for column, want in pairs))
    while _spare(widths, room) < 0:
        rank, last = max((columns[at].rank, at) for at in widths)
        if not rank:
            break
        del widths[last]
    while _spare(widths, room) < 0 < max(widths.values()):
        widths[max(widths, key=widths.__getitem__)] -= 1
    spare = max(0, _spare(widths, room))
    return tuple(Place(at, w + spare * bool(columns[at].least)) for at, w in widths.items())


def _spare(widths: dict[int, int], room: int) -> int:
    return room - sum(widths.values()) - GAP * (len(widths) - 1)


def wanted_widths(listing: Listing) -> list[int]:
    """The widest text of each column in the rows that are shown, its head included."""
    columns = listing.page.columns
    rows = [heads(listing), *(row_cells(listing, line) for line in listing.lines)]
    return [max(cell_len(row[at]) for row in rows) for at in range(len(columns))]


def row_cells(listing: Listing, line: Line) -> tuple[str, ...]:
    """A row's texts, the first one with its place in the tree before it."""
    first, *others = listing.cells(line.item)
    if not listing.is_tree:
        return first, *others
    mark = " " if not line.item.inside else "▾" if listing.is_open(line.item) else "▸"
    return f"{'  ' * len(line.parents)}{mark} {first}", *others


def heads(listing: Listing) -> tuple[str, ...]:
    """The columns' names, that of the sorted one with an arrow the way that values go."""
    return tuple(_head(column, listing) for column in listing.page.columns)


def laid_out(
    cells: Sequence[str], columns: Sequence[Column], places: Sequence[Place]
) -> Iterator[str]:
    """The texts of a row in their columns, each with the gap that follows it.

    The last text takes the room of the empty ones that follow it.
    """
    last = max((n for n, place in enumerate(places) if cells[place.at]), default=0)
    for n, place in enumerate(places):
        text, width = cells[place.at], place.width
        if columns[place.at].is_number:
            text = " " * (width - cell_len(text)) + text
        if n == last:
            rest = sum(GAP + other.width for other in places[n + 1 :])
            yield clip(text, width + rest)
            return
        yield clip(text, width) + " " * GAP


def _head(column: Column, listing: Listing) -> str:
    if column.name != listing.look.sort:
        return column.name
    is_descending = column.is_number != listing.look.is_reversed
    return f"{column.name} {'↓' if is_descending else '↑'}"
