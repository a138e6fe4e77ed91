"""A page as it is being looked at: what is open, sorted, filtered, looked for and selected."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from graphkit.tui.filtering import matcher
from graphkit.tui.lines import EVERYTHING, Line, by_column, flatten, keys_around
from graphkit.views.figures import plain
from graphkit.views.pages.page import Item, Page


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """How a page is looked at. The pages beside it can be looked at in the same way.

    Attributes:
        sort: Name of the column that orders the rows; empty for the page's own order.
        is_reversed: Whether that order is turned round.
        filter: Words that rows must hold.
        search: Words that are looked for.
        opened: Keys of the open items.
        cursor: Key of the selected item.
    """

    sort: str = ""
    is_reversed: bool = False
    filter: str = ""
    search: str = ""
    opened: frozenset[str] = frozenset()
    cursor: str = ""


class Listing:
    """The rows of a page under one look. Verbs change the look; the cursor stays on its item."""

    def __init__(self, page: Page, look: Look | None = None) -> None:
        self.page = page
        self.look = look or Look(opened=page.opened)
        self.at = 0
        self.is_tree = any(item.inside for item in page.items)
        self._cells: dict[str, tuple[str, ...]] = {}
        self._change()

    @cached_property
    def lines(self) -> tuple[Line, ...]:
        """The rows that are shown."""
        return self._flat(opened=self.look.opened)

    @cached_property
    def every_line(self) -> tuple[Line, ...]:
        """The rows as they would be with all items open."""
        return self._flat(opened=EVERYTHING)

    @cached_property
    def matches(self) -> tuple[Line, ...]:
        """The rows that hold what is looked for, those in closed items included."""
        return tuple(self._holding(self.look.search, self.every_line))

    @property
    def line(self) -> Line | None:
        """The selected row; ``None`` if there is no row at all."""
        return self.lines[self.at] if self.lines else None

    @property
    def item(self) -> Item | None:
        """The selected item."""
        return self.line.item if self.line else None

    @property
    def match_at(self) -> int:
        """Which of the matches is selected, from 1; 0 if none is."""
        keys = [line.item.key for line in self.matches]
        return keys.index(self.look.cursor) + 1 if self.look.cursor in keys else 0

    @property
    def empty(self) -> str:
        """What to say where no row is shown."""
        return f"no row holds {self.look.filter!r}" if self.look.filter else self.page.empty

    def cells(self, item: Item) -> tuple[str, ...]:
        """An item's values as text, each on one line."""
        if item.key not in self._cells:
            pairs = zip(self.page.columns, item.values, strict=True)
            self._cells[item.key] = tuple(
                "" if value is None else plain(column.show(value)) for column, value in pairs
            )
        return self._cells[item.key]

    def go(self, at: int) -> None:
        """Select the row of that place, or the one nearest to it."""
        self.at = max(0, min(at, len(self.lines) - 1))
        if self.item:  # where a filter leaves none, the next one shall come back to it
            self.look = replace(self.look, cursor=self.item.key)

    def sort_next(self) -> None:
        """Sort by the next column; after the last one comes the page's own order."""
        names = [*(column.name for column in self.page.columns), ""]
        here = names.index(self.look.sort) if self.look.sort in names else -1
        self.sort_by(names[(here + 1) % len(names)])

    def sort_by(self, name: str) -> None:
        """Sort by a column: numbers from the largest down, text from a to z."""
        self._change(sort=name, is_reversed=False)

    def sort_by_or_reverse(self, name: str) -> None:
        """Sort by a column; once more turns the order round."""
        if name == self.look.sort:
            self.reverse()
        else:
            self.sort_by(name)

    def reverse(self) -> None:
        """Turn the order round."""
        self._change(is_reversed=not self.look.is_reversed)

    def filter(self, words: str) -> None:
        """Keep the rows that hold these words, and what they are in; no words keep all."""
        self._change(filter=words.strip())
        found = self._holding(self.look.filter, self.every_line)
        self._change(opened=self.look.opened | keys_around(found))

    def search(self, words: str) -> bool:
        """Look for words, from the selected row on; returns whether any row holds them."""
        self._change(search=words.strip())
        return bool(self.match_at) or self.next_match(1)

    def next_match(self, step: int) -> bool:
        """Select the match that comes next, or for -1 the one before; the ends meet."""
        if not self.matches:
            return False
        keys = [line.item.key for line in self.every_line]
        places = {key: place for place, key in enumerate(keys)}
        here = places.get(self.look.cursor, 0)
        ordered = self.matches[::step]
        beyond = (line for line in ordered if (places[line.item.key] - here) * step > 0)
        found = next(beyond, ordered[0])
        self._change(opened=self.look.opened | keys_around([found]), cursor=found.item.key)
        return True

    def is_open(self, item: Item) -> bool:
        """Whether the items below it are shown."""
        return item.inside is not None and item.key in self.look.opened

    def open(self) -> None:
        """Show what is in the selected item; where that is one single item, what is in it, too."""
        opened, item = set(self.look.opened), self.item
        while item and item.inside:
            opened.add(item.key)
            item = item.children[0] if len(item.children) == 1 else None
        self._change(opened=frozenset(opened))

    def close(self) -> None:
        """Hide what is in the selected item; on one that is closed, go to the item around it."""
        if self.item and self.is_open(self.item):
            self._change(opened=self.look.opened - {self.item.key})
        elif self.line and self.line.parents:
            self._change(cursor=self.line.parents[-1])

    def open_all(self) -> None:
        """Show everything."""
        self._change(opened=keys_around(self.every_line))

    def close_all(self) -> None:
        """Show the outermost items only."""
        self._change(opened=frozenset())

    def _change(self, **facts: Any) -> None:
        """Look differently, with the cursor on its item or else on what that is in."""
        before = self.__dict__.get("lines", ())
        around = before[self.at].parents if before else ()
        self.look = replace(self.look, **facts)
        for cached in ("lines", "every_line", "matches", "_kept"):
            self.__dict__.pop(cached, None)
        places = {line.item.key: place for place, line in enumerate(self.lines)}
        wanted = (self.look.cursor, *reversed(around))
        self.go(next((places[key] for key in wanted if key in places), self.at))

    def _flat(self, opened: Any) -> tuple[Line, ...]:
        order = by_column(self.page.columns, self.look.sort, self.look.is_reversed)
        return tuple(flatten(self.page.items, opened=opened, kept=self._kept, order=order))

    @cached_property
    def _kept(self) -> Any:
        """Keys of the items that the filter leaves."""
        if not self.look.filter:
            return EVERYTHING
        found = list(self._holding(self.look.filter, flatten(self.page.items)))
        return keys_around(found).union(line.item.key for line in found)

    def _holding(self, words: str, lines: Iterable[Line]) -> Iterable[Line]:
        found = matcher(words, [column.name for column in self.page.columns])
        if not found:
            return ()
        return (line for line in lines if found(self.cells(line.item), line.item.note))
