"""Rows of a tree as lines: which are visible, which contain words, and the columns that fit."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.cells import cell_len, set_cell_size

from graphkit.records import count_of
from graphkit.views.formatting import us
from graphkit.views.module_tree import total_us
from graphkit.views.pages.page_model import Column, Page, Row

Order = Callable[[Sequence[Row]], Sequence[Row]]
"""Sorts the rows of one parent."""
_Test = Callable[[Row], bool]
GAP = 2
"""Cells between two columns."""
_WORD = re.compile(r"\w+")
Match = Callable[[Sequence[str], str], bool]
"""Returns whether a row contains the words, from its cells and its note."""


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

    Numbers descend and text ascends unless reversed; rows without a value stay last. Numbers within
    text count as numbers: ``layers.2`` precedes ``layers.10``.
    """
    index = next((at for at, column in enumerate(columns) if column.name == name), None)
    if index is None:
        return (lambda rows: rows[::-1]) if is_reversed else (lambda rows: rows)
    at, descending = index, columns[index].is_number != is_reversed

    def order(rows: Sequence[Row]) -> Sequence[Row]:
        with_value = [row for row in rows if row.values[at] is not None]
        with_value.sort(key=lambda row: _natural(row.values[at]), reverse=descending)
        return [*with_value, *(row for row in rows if row.values[at] is None)]

    return order


def _natural(value: Any) -> Any:
    """Return a sort key: a number as it is; text as parts, of which every second is a number."""
    if not isinstance(value, str):
        return value
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", value)]


@dataclass(frozen=True, slots=True)
class ColumnSpan:
    """A column that fits.

    Attributes:
        index: Its index among the page's columns.
        width: Its width in cells.
    """

    index: int
    width: int


def fit(columns: Sequence[Column], wanted: Sequence[int], room: int) -> tuple[ColumnSpan, ...]:
    """Return the columns that fit into a line, in order, with their widths.

    Columns are left out by ``rank`` until the narrowest widths fit. Columns of rank 0 stay: if they
    need more than the line, the widest are narrowed. What is left widens the columns that were
    narrow, in order, then the column with ``least``.

    Args:
        columns: All columns.
        wanted: Width of the widest text of each column, in cells.
        room: Width of the line, in cells.
    """
    pairs = zip(columns, wanted, strict=True)
    full = [column.least or min(want, column.most) for column, want in pairs]
    widths = {i: min(width, columns[i].narrow or width) for i, width in enumerate(full)}
    while _spare(widths, room) < 0:
        rank, index = max((columns[i].rank, i) for i in widths)
        if rank == 0:
            break
        del widths[index]
    while _spare(widths, room) < 0 < max(widths.values()):
        widths[max(widths, key=widths.__getitem__)] -= 1
    for i in widths:
        widths[i] += max(0, min(_spare(widths, room), full[i] - widths[i]))
    spare = max(0, _spare(widths, room))
    return tuple(ColumnSpan(i, w + spare * bool(columns[i].least)) for i, w in widths.items())


def _spare(widths: dict[int, int], room: int) -> int:
    return room - sum(widths.values()) - GAP * (len(widths) - 1)


def widest(rows: Sequence[Sequence[str]]) -> list[int]:
    """Return the width of the widest text of each column, in cells."""
    return [max(map(cell_len, texts)) for texts in zip(*rows, strict=True)]


def align_cells(
    cells: Sequence[str], columns: Sequence[Column], spans: Sequence[ColumnSpan]
) -> Iterator[str]:
    """Yield the texts of a row, each padded or clipped to its column and followed by the gap.

    The last text extends over the empty cells that follow it.
    """
    last = max((n for n, span in enumerate(spans) if cells[span.index]), default=0)
    for n, span in enumerate(spans):
        text, width = cells[span.index], span.width
        if columns[span.index].is_number:
            text = " " * (width - cell_len(text)) + text
        if n == last:
            rest = sum(GAP + other.width for other in spans[n + 1 :])
            yield clip(text, width + rest)
            return
        yield clip(text, width) + " " * GAP


def clip(text: str, width: int) -> str:
    """Return the text in exactly ``width`` cells; text that does not fit ends in an ellipsis."""
    if text.isascii() and len(text) <= width:
        return text.ljust(width)
    if cell_len(text) <= width:
        return set_cell_size(text, width)
    return set_cell_size(set_cell_size(text, max(width - 1, 0)).rstrip() + "…", width)


def matcher(words: str, columns: Sequence[str]) -> Match | None:
    """Return the test for rows that contain every word, in any case; ``None`` for no words.

    ``name:part`` searches only the column with the word ``name`` in its heading. A name that no
    column has, as in ``at::native``, is searched as text.
    """
    names = [_WORD.findall(name.casefold()) for name in columns]
    tests = [_test(word.casefold(), names) for word in words.split()]
    return (lambda cells, note: all(test(cells, note) for test in tests)) if tests else None


def sum_text(page: Page, lines: Iterable[Line]) -> str:
    """Return number, time in us and share of the rows' nodes, as text; empty if the page has none.

    A node in several of the rows, such as its own row and its module's, counts once.
    """
    if not page.nodes:
        return ""
    nodes = {node.index: node for line in lines for node in line.row.nodes}.values()
    time, whole = total_us(nodes), total_us(page.nodes)
    parts = [count_of(len(nodes), "node")]
    if time is not None:
        parts.append(f"{us(time)} us")
        if whole is not None and whole > 0:
            parts.append(f"{time / whole:.1%}")
    return ", ".join(parts)


def _test(word: str, names: Sequence[Sequence[str]]) -> Match:
    name, _, part = word.partition(":")
    column = next((index for index, words in enumerate(names) if name in words), None)
    if part and column is not None:
        return lambda cells, _note: part in cells[column].casefold()
    return lambda cells, note: any(word in text.casefold() for text in (*cells, note))
