"""What one screen shows, as data: items in columns. Nothing in here knows a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

Link: TypeAlias = "Callable[[], Page] | str"
"""What makes the page that a key leads to, or the sentence that says why there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column of a page.

    Attributes:
        name: Its head, unique on the page; a filter ``name:word`` looks only here.
        show: Makes text of a value that is not ``None``.
        is_number: Right-aligned, and sorted largest first.
        rank: Where the terminal is narrow, the highest rank goes first; 0 always stays.
        most: Cells that it takes at most.
        least: For the one column that takes what the others leave: cells that it needs.
    """

    name: str
    show: Callable[[Any], str] = str
    is_number: bool = False
    rank: int = 0
    most: int = 24
    least: int = 0


@dataclass(eq=False, kw_only=True)
class Item:
    """One row, and what is behind it.

    Attributes:
        key: Unique on its page, and the same on the pages beside it if it is the same thing there.
        values: One per column; ``None`` where it has none.
        note: The whole of what the columns may cut off; shown while the row is selected.
        tone: ``good``, ``warning``, ``bad`` or ``faint``, for what its text says already.
        inside: Makes the items below it, when they are asked for.
        links: Where keys lead from here, by the name of the view; ``open`` is the Enter key.
    """

    key: str
    values: tuple[Any, ...]
    note: str = ""
    tone: str = ""
    inside: Callable[[], Iterable[Item]] | None = None
    links: Mapping[str, Link] = field(default_factory=dict)

    @cached_property
    def children(self) -> tuple[Item, ...]:
        """The items below it."""
        return tuple(self.inside()) if self.inside else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """The pages that are like this one, such as the other sizes of a mode.

    Attributes:
        count: How many there are, this one included.
        at: The place of this one.
        make: From a place to its page.
    """

    count: int
    at: int
    make: Callable[[int], Page]


@dataclass(frozen=True, kw_only=True)
class Page:
    """One screen's worth of items.

    Attributes:
        title: What it shows, in few words.
        facts: What holds for all of it, the most important first.
        columns: The first one carries the tree.
        items: The outermost ones.
        opened: Keys of the items that are open at first.
        links: Where keys lead from anywhere on the page.
        beside: Where Tab leads; ``None`` if there is nothing like it.
        empty: What to say if there are no items.
    """

    title: str
    facts: tuple[str, ...] = ()
    columns: tuple[Column, ...]
    items: tuple[Item, ...]
    opened: frozenset[str] = frozenset()
    links: Mapping[str, Link] = field(default_factory=dict)
    beside: Beside | None = None
    empty: str = "nothing here"

    def link(self, name: str, item: Item | None) -> Link | None:
        """Where a key leads with that item selected; ``None`` if nobody knows."""
        found = item.links.get(name) if item else None
        return found or self.links.get(name)
