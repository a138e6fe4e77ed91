"""One view on the screen: what it shows, the listing, and what its keys do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding
from textual.screen import Screen
from textual.widgets import Static

from graphkit.tui.clip import folded
from graphkit.tui.export import free_name, view_text, write_new
from graphkit.tui.help import help_page
from graphkit.tui.keys import KEYS, footer
from graphkit.tui.listing import Listing
from graphkit.tui.prompt import Prompt
from graphkit.tui.sheet import Sheet
from graphkit.tui.standing import packed, standing
from graphkit.views.figures import plain
from graphkit.views.pages.page import Page

LEAST_WIDTH, LEAST_HEIGHT = 40, 12
_STATUS_LINES = 3
_WHILE_TYPING = ("back", "app.quit")


class ListingScreen(Screen[None], inherit_bindings=False):
    """A page, whatever it holds: all views look alike and have the same keys."""

    AUTO_FOCUS = ""
    BINDINGS: ClassVar = [
        Binding(key.keys, key.action, key.label, priority=key.keys == "ctrl+c") for key in KEYS
    ]
    DEFAULT_CSS = """
    ListingScreen Static { height: 1; }
    ListingScreen #title, ListingScreen #facts { text-wrap: nowrap; text-overflow: ellipsis; }
    ListingScreen #title { text-style: bold; }
    ListingScreen #facts { height: auto; max-height: 2; }
    ListingScreen #note { height: auto; min-height: 2; }
    ListingScreen #status { height: auto; text-style: reverse; }
    ListingScreen #small { display: none; height: 1fr; }
    ListingScreen.-small > * { display: none; }
    ListingScreen.-small > #small { display: block; }
    """

    def __init__(self, page: Page, above: Sequence[str] = ()) -> None:
        super().__init__()
        self._above = tuple(above)
        self.listing = Listing(page)
        self._sheet, self._prompt = Sheet(self.listing), Prompt()

    @property
    def path(self) -> tuple[str, ...]:
        """The titles of the views that led here, and of this one."""
        return *self._above, self.listing.page.title

    def compose(self) -> ComposeResult:
        """The view's parts from top to bottom."""
        yield from (Static(id=name) for name in ("title", "facts"))
        yield self._sheet
        yield from (Static(id=name) for name in ("note", "status"))
        yield self._prompt
        yield from (Static(id=name) for name in ("footer", "small"))

    def on_resize(self) -> None:
        """Fill the parts, or say that there is no room for them."""
        width, height = self.size
        self.set_class(width < LEAST_WIDTH or height < LEAST_HEIGHT, "-small")
        needed = f"{LEAST_WIDTH} x {LEAST_HEIGHT} are needed"
        self._tell("small", f"terminal too small: {width} x {height}, {needed}")
        self._tell("footer", footer(width))
        self._show_page()

    async def on_sheet_touched(self, event: Sheet.Touched) -> None:
        """The mouse did what keys do."""
        self._show_place()
        if event.opens:
            await self.action_enter()

    def check_action(self, action: str, _parameters: tuple[object, ...]) -> bool | None:
        """While words are typed, keys are letters."""
        return not self._prompt.display or action in _WHILE_TYPING

    def action_move(self, step: int, unit: str) -> None:
        """Select another row: the next one, the next page's, the last."""
        rows = {"row": 1, "page": self._sheet.num_rows, "end": len(self.listing.lines)}[unit]
        self.listing.go(self.listing.at + step * rows)
        self._sheet.follow()
        self._show_place()

    def action_do(self, verb: str) -> None:
        """FieldChange the listing: sort it, open it."""
        getattr(self.listing, verb)()
        self._show_rows()

    async def action_enter(self) -> None:
        """Go to what the row stands for; else open or close it."""
        item = self.listing.item
        if item and item.inside and "open" not in item.links:
            self.action_do("close" if self.listing.is_open(item) else "open")
        else:
            await self.action_view("open")

    async def action_view(self, name: str) -> None:
        """Go to another view from here, or say why there is none."""
        link = self.listing.page.link(name, self.listing.item)
        if callable(link):
            await self._push(link())
        else:
            self._say(link or f"{name}: nothing here to go to")

    async def action_help(self) -> None:
        """Show what the keys do."""
        await self._push(help_page())

    def action_back(self) -> None:
        """Leave the prompt, or this view for the one before."""
        if self._prompt.display:
            self._prompt.dismiss()
            self._show_place()
        elif self._above:
            self.app.pop_screen()
        else:
            self._say("this is the first view; q leaves")

    def action_beside(self, step: int) -> None:
        """Look at the next of its kind in the same way."""
        beside = self.listing.page.beside
        if beside is None or beside.count < 2:
            self._say("nothing of its kind is beside this")
            return
        page, look = beside.make((beside.at + step) % beside.count), self.listing.look
        self.listing = Listing(page, replace(look, opened=look.opened | page.opened))
        self._sheet.listing = self.listing
        self._show_page()

    def action_search(self) -> None:
        """Ask what to look for."""
        self._prompt.ask("search", self.listing.look.search, self._search)

    def action_match(self, step: int) -> None:
        """Select the next row that holds what is looked for."""
        if not self.listing.look.search:
            self._say("nothing is looked for; / asks what")
        else:
            self._found(self.listing.next_match(step))

    def action_filter(self) -> None:
        """Ask which rows to keep."""
        self._prompt.ask("filter", self.listing.look.filter, self._filter)

    def action_export(self) -> None:
        """Ask for a file, and write the view there."""
        self._prompt.ask("write to", free_name(self.path), self._export)

    async def _push(self, page: Page) -> None:
        """Show another page, and wait until it can take the keys that come next."""
        await self.app.push_screen(ListingScreen(page, self.path))

    def _search(self, words: str) -> None:
        self._found(self.listing.search(words))

    def _found(self, is_found: bool) -> None:
        self._show_rows()
        if self.listing.look.search and not is_found:
            self._say(f"no row holds {self.listing.look.search!r}")

    def _filter(self, words: str) -> None:
        self.listing.filter(words)
        self._show_rows()

    def _export(self, name: str) -> None:
        self._show_place()
        if name.strip():
            self._say(write_new(name, view_text(self.path, self.listing)))

    def _show_page(self) -> None:
        page = self.listing.page
        self._tell("title", plain(page.title))
        self._tell("facts", packed(page.facts, self.size.width))
        self._show_rows()

    def _show_rows(self) -> None:
        self._sheet.update()
        self._show_place()

    def _show_place(self) -> None:
        note = plain(self.listing.item.note) if self.listing.item else ""
        self._tell("note", folded(note, self.size.width, max(2, self.size.height // 4)))
        self._say(standing(self.path, self.listing, self.size.width))

    def _say(self, text: str) -> None:
        self._tell("status", folded(plain(text), self.size.width, _STATUS_LINES))

    def _tell(self, name: str, text: str) -> None:
        self.query_one(f"#{name}", Static).update(Text(text))
