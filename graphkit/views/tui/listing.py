"""A page with its state: open rows, order, filter and cursor."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from graphkit.records import count_of
from graphkit.views.formatting import plain, us
from graphkit.views.module_tree import total_us
from graphkit.views.pages.page_model import Column, Page, Row
from graphkit.views.text.page import Line, Order, flatten, keys_around

_WORD = re.compile(r"\w+")
Match = Callable[[Sequence[str], str], bool]
"""Returns whether a row contains the words, from its cells and its note."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewState:
    """State of a page; its siblings can be shown in the same state.

    Attributes:
        sort: Name of the column that sorts the rows; empty for the page's own order.
        is_reversed: True if that order is reversed.
        filter: Words that visible rows contain.
        opened: Keys of the open rows.
        cursor: Key of the selected row.
    """

    sort: str = ""
    is_reversed: bool = False
    filter: str = ""
    opened: frozenset[str] = frozenset()
    cursor: str = ""


_OF_STATE = ("lines", "all_lines", "_passing", "_filter_sum")
"""What a listing computes from its state when it is first needed."""


class Listing:
    """The rows of a page in one state; a change of state keeps the selected row."""

    def __init__(self, page: Page, state: ViewState | None = None) -> None:
        self.page = page
        self.state = state or ViewState(opened=page.opened)
        self.at = 0
        self._is_tree = any(row.make_children for row in page.rows)
        self._cells: dict[str, tuple[str, ...]] = {}
        self._change()

    @cached_property
    def lines(self) -> tuple[Line, ...]:
        """The visible rows."""
        return self._flatten(lambda row: row.key in self.state.opened)

    @cached_property
    def all_lines(self) -> tuple[Line, ...]:
        """The rows that would be visible if all were open."""
        return self._flatten(lambda _row: True)

    @property
    def line(self) -> Line | None:
        """The selected line; ``None`` if there are no rows."""
        return self.lines[self.at] if self.lines else None

    @property
    def row(self) -> Row | None:
        """The selected row."""
        return self.line.row if self.line else None

    @property
    def empty(self) -> str:
        """Sentence to show if there are no rows."""
        return f"no row contains {self.state.filter!r}" if self.state.filter else self.page.empty

    @property
    def status(self) -> tuple[str, ...]:
        """Position, order, and the filter with the sum of what passes it, as texts."""
        return tuple(map(plain, self._status()))

    def cells(self, row: Row) -> tuple[str, ...]:
        """Return a row's values as text, each on one line."""
        if row.key not in self._cells:
            self._cells[row.key] = self.page.cells(row)
        return self._cells[row.key]

    def containing(self, words: str, lines: Iterable[Line]) -> Iterator[Line]:
        """Yield the lines that contain the words; none for no words."""
        matches = matcher(words, [column.name for column in self.page.columns])
        if matches:
            rows = ((line, line.row) for line in lines)
            yield from (line for line, row in rows if matches(self._own_cells(row), row.note))

    def _own_cells(self, row: Row) -> tuple[str, ...]:
        """Return the cells of a row without those that sum up the rows inside it."""
        cells = self.cells(row)
        if not row.make_children:
            return cells
        pairs = zip(cells, self.page.columns, strict=True)
        return tuple("" if column.sums_up else cell for cell, column in pairs)

    def line_cells(self, line: Line) -> tuple[str, ...]:
        """Return a line's texts, the first one indented and marked if it can be opened."""
        first, *others = self.cells(line.row)
        if not self._is_tree:
            return first, *others
        mark = " " if not line.row.make_children else "▾" if self.is_open(line.row) else "▸"
        return f"{'  ' * len(line.parents)}{mark} {first}", *others

    @property
    def headings(self) -> tuple[str, ...]:
        """Names of the columns; an arrow shows the order of the sorted one."""
        return tuple(self._heading(column) for column in self.page.columns)

    def is_open(self, row: Row) -> bool:
        """Return True if the rows inside it are visible."""
        return row.make_children is not None and row.key in self.state.opened

    def go(self, at: int) -> None:
        """Select the row at that position, or the nearest one."""
        self.at = max(0, min(at, len(self.lines) - 1))
        if self.row:  # if a filter leaves no row, the next filter restores the cursor
            self.state = replace(self.state, cursor=self.row.key)

    def sort_next(self) -> None:
        """Sort by the next column; the page's own order follows the last one."""
        names = [*(column.name for column in self.page.columns), ""]
        current = names.index(self.state.sort) if self.state.sort in names else -1
        self.sort_by(names[(current + 1) % len(names)])

    def sort_by(self, name: str) -> None:
        """Sort by a column: numbers in descending order, text in ascending order."""
        self._change(sort=name, is_reversed=False)

    def sort_by_or_reverse(self, name: str) -> None:
        """Sort by a column, or reverse the order if it is sorted by that column."""
        if name == self.state.sort:
            self.reverse()
        else:
            self.sort_by(name)

    def reverse(self) -> None:
        """Reverse the order."""
        self._change(is_reversed=not self.state.is_reversed)

    def filter(self, words: str) -> None:
        """Show only rows that contain the words and the rows around them; no words show all."""
        self._change(filter=words.strip())
        lines = self.containing(self.state.filter, self.all_lines)
        self._change(opened=self.state.opened | keys_around(lines))

    def open(self) -> None:
        """Show the rows inside the selected one; a single one is opened as well."""
        opened, row = set(self.state.opened), self.row
        while row and row.make_children:
            opened.add(row.key)
            row = row.children[0] if len(row.children) == 1 else None
        self._change(opened=frozenset(opened))

    def close(self) -> None:
        """Hide the rows inside the selected one; if it is closed, select the row around it."""
        if self.row and self.is_open(self.row):
            self._change(opened=self.state.opened - {self.row.key})
        elif self.line and self.line.parents:
            self._change(cursor=self.line.parents[-1])

    def open_all(self) -> None:
        """Show all rows."""
        self._change(opened=keys_around(self.all_lines))

    def close_all(self) -> None:
        """Show only the outermost rows."""
        self._change(opened=frozenset())

    @cached_property
    def _passing(self) -> tuple[Line, ...]:
        """The rows that pass the filter."""
        return tuple(self.containing(self.state.filter, flatten(self.page.rows)))

    @cached_property
    def _filter_sum(self) -> str:
        return sum_text(self.page, self._passing)

    def _flatten(self, is_open: Callable[[Row], bool]) -> tuple[Line, ...]:
        state, kept = self.state, set[str]()
        if state.filter:  # the rows that pass it, and those around them
            kept = {line.row.key for line in self._passing} | keys_around(self._passing)
        return tuple(
            flatten(
                self.page.rows,
                is_open=is_open,
                is_kept=lambda row: not state.filter or row.key in kept,
                order=order_by(self.page.columns, state.sort, state.is_reversed),
            )
        )

    def _change(self, **facts: Any) -> None:
        """Change the state, with the cursor on its row or else on the nearest one around it."""
        around = self.line.parents if self.line else ()
        self.state = replace(self.state, **facts)
        for name in _OF_STATE:
            self.__dict__.pop(name, None)
        positions = {line.row.key: at for at, line in enumerate(self.lines)}
        wanted = (self.state.cursor, *reversed(around))
        self.go(next((positions[key] for key in wanted if key in positions), self.at))

    def _status(self) -> Iterator[str]:
        state, count = self.state, len(self.lines)
        yield f"row {self.at + 1 if count else 0}/{count:,}"
        siblings = self.page.siblings
        if siblings and siblings.count > 1:
            yield f"tab {siblings.index + 1}/{siblings.count}"
        if state.sort or state.is_reversed:
            yield f"sort {state.sort or 'none'}{' reversed' if state.is_reversed else ''}"
        if state.filter:
            total = self._filter_sum
            yield f"filter {state.filter}" + (f" ({total})" if total else "")

    def _heading(self, column: Column) -> str:
        if column.name != self.state.sort:
            return column.name
        is_descending = column.is_number != self.state.is_reversed
        return f"{column.name} {'↓' if is_descending else '↑'}"


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
