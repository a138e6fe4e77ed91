"""A page as plain data: a title, facts, and rows in columns, drawn in a pipe and on a screen."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, TypeAlias

from graphkit.records import ModeRecord, Node
from graphkit.views.formatting import plain
from graphkit.views.selection import NamedGraph

Link: TypeAlias = "Callable[[], Page] | str"
"""Makes the page that a key leads to; or a sentence that says why there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column of a page.

    Attributes:
        name: Its heading, unique on the page; a filter ``name:word`` searches this column.
        show: Returns the text of a value that is not ``None``.
        is_number: True if it is right-aligned and sorted in descending order.
        rank: Order in which columns are left out of a narrow page, the highest first; 0 stays.
        most: Largest width in cells.
        least: Needed width in cells of the column that takes all spare width; 0 for all others.
        narrow: Width in cells to which it shrinks before other columns are left out; 0 for none.
        draw: Returns a picture of a value in that many cells, for the screen; ``None`` for text.
        tint: Colours cells by the ``part`` of their row, or by ``heat``, a value that is a share.
        sums_up: True if the cell of a row repeats what the rows inside of it say: a search
            finds only the innermost of them.
    """

    name: str
    show: Callable[[Any], str] = str
    is_number: bool = False
    rank: int = 0
    most: int = 24
    least: int = 0
    narrow: int = 0
    draw: Callable[[Any, int], str] | None = None
    tint: str = ""
    sums_up: bool = False


@dataclass(eq=False, kw_only=True)
class Row:
    """One row of a page, and the rows inside it.

    Attributes:
        key: Unique on its page; equal on sibling pages for the same thing.
        values: One per column; ``None`` where the row has none.
        note: Full text of what columns may clip; the screen shows it for the selected row.
        tone: ``good``, ``warning``, ``bad`` or ``faint``; repeats in colour what the text says.
        make_children: Makes the rows inside it when they are first needed.
        is_run: True if the rows inside are equal and this one sums them up.
        links: Pages that keys lead to, by name; ``open`` is the Enter key.
        nodes: Nodes of a graph that it shows or sums up.
        part: Name of the part of a step that all of them belong to; empty if several.
    """

    key: str
    values: tuple[Any, ...]
    note: str = ""
    tone: str = ""
    make_children: Callable[[], Iterable[Row]] | None = None
    is_run: bool = False
    links: Mapping[str, Link] = field(default_factory=dict)
    nodes: Sequence[Node] = ()
    part: str = ""

    @cached_property
    def children(self) -> tuple[Row, ...]:
        """The rows inside it."""
        return tuple(self.make_children()) if self.make_children else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Siblings:
    """Pages of the same kind, such as the sizes of a mode: how many, which one, how to make it."""

    count: int
    index: int
    make: Callable[[int], Page]


@dataclass(frozen=True, kw_only=True)
class Page:
    """One page.

    Attributes:
        title: Names what it shows.
        crumb: Its name in the path of pages; the title if empty.
        facts: Name and text of facts about all of it, the most important first.
        columns: The first one shows the tree.
        rows: The outermost rows.
        notes: Sentences below the table in a pipe; the screen has them as notes of rows.
        opened: Keys of the rows that are open at first.
        links: Pages that keys lead to from any row, by name.
        siblings: Pages that Tab leads to; ``None`` if there are none.
        empty: Sentence to show if there are no rows.
        nodes: All nodes of the graph that its rows are about; shares are shares of their time.
    """

    title: str
    crumb: str = ""
    facts: tuple[tuple[str, str], ...] = ()
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    opened: frozenset[str] = frozenset()
    links: Mapping[str, Link] = field(default_factory=dict)
    siblings: Siblings | None = None
    empty: str = "no rows"
    nodes: Sequence[Node] = ()

    def cells(self, row: Row) -> tuple[str, ...]:
        """Return a row's values as text, each on one line."""
        return tuple(
            "" if value is None else plain(column.show(value))
            for column, value in zip(self.columns, row.values, strict=True)
        )

    def link(self, name: str, row: Row | None) -> Link | None:
        """Return the link of that name of a selected row, or of the page; ``None`` if none."""
        own = row.links.get(name) if row else None
        return own or self.links.get(name)

    def without_pictures(self) -> Page:
        """Return the page with empty columns in place of bars and other pictures."""
        columns = (
            replace(column, name="", show=lambda _value: "") if column.draw else column
            for column in self.columns
        )
        return replace(self, columns=tuple(columns))


@dataclass(frozen=True, slots=True)
class GraphGroup:
    """The graphs of one mode, or of one process, through which Tab steps.

    Attributes:
        graphs: The graphs with their names, in the record's order.
        modes: All modes of the record.
        make_links: Makes the link to a page of the graph with an index, by the name of the link.
            Empty for pages in a pipe, which lead nowhere.
    """

    graphs: tuple[NamedGraph, ...]
    modes: tuple[ModeRecord, ...] = ()
    make_links: Mapping[str, Callable[[GraphGroup, int], Link]] = field(default_factory=dict)

    def links(self, index: int) -> dict[str, Link]:
        """Return the links to the pages of a graph; each of these pages has them, too."""
        return {name: make(self, index) for name, make in self.make_links.items()}

    def page(
        self,
        index: int,
        make: Callable[[GraphGroup, int], Page],
        *,
        key: str = "",
        crumb: str,
        **facts: Any,
    ) -> Page:
        """Return a page of a graph, with links to its other pages.

        ``make`` makes the same page of another graph of the group. ``key`` is the name of the link
        to this page, if others have one; ``crumb`` then says what it shows.
        """
        here = {key: f"this page shows the {crumb}"} if key else {}
        title = f"{crumb} of {self.graphs[index][0]}" if key else self.graphs[index][0]
        return Page(
            title=title,
            crumb=crumb,
            links={**self.links(index), **here},
            siblings=Siblings(count=len(self.graphs), index=index, make=partial(make, self)),
            nodes=self.graphs[index][1].nodes,
            **facts,
        )


def count_column(name: str, rank: int, show: Callable[[Any], str] = "{:,}".format) -> Column:
    """Return a column of numbers."""
    return Column(name=name, show=show, is_number=True, rank=rank)


def section(key: str, values: tuple[Any, ...], rows: Iterable[Row], **facts: Any) -> Row:
    """Return a row that contains rows; without any it cannot be opened."""
    made = tuple(rows)
    return Row(key=key, values=values, make_children=(lambda: made) if made else None, **facts)
