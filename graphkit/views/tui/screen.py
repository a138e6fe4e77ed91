"""The screen: a stack of pages, of which the last one is shown, and the actions of its keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal
from textual.screen import Screen
from textual.widgets import Input, Static

from graphkit.views.formatting import plain
from graphkit.views.lines import clip
from graphkit.views.pages import Page
from graphkit.views.source_code import source_line, source_sentence
from graphkit.views.tui.export import listing_text, unused_name, write_new
from graphkit.views.tui.icicle_strip import IcicleStrip, followed, row_at, zoomed
from graphkit.views.tui.keys import KEYS, KeyLine, help_page
from graphkit.views.tui.listing import Listing
from graphkit.views.tui.row_list import RowList
from graphkit.views.tui.texts import SEPARATOR, common_module, fold, pack, place_line

LEAST_WIDTH, LEAST_HEIGHT = 40, 12
_STATUS_LINES = 3
_WHILE_TYPING = ("back", "app.quit")


class PageScreen(Screen[None], inherit_bindings=False):
    """Shows pages of any kind with the same widgets and keys."""

    AUTO_FOCUS = ""
    BINDINGS: ClassVar[list[BindingType]] = [*KEYS]
    DEFAULT_CSS = """
    PageScreen {
        Static { height: 1; }
        #facts { height: auto; max-height: 2; text-wrap: nowrap; text-overflow: ellipsis; }
        #note { height: auto; min-height: 2; }
        #status { height: auto; text-style: reverse; }
        #prompt { height: 1; display: none; }
        #question { width: auto; text-style: bold; }
        Input, Input:focus { border: none; height: 1; padding: 0 1; width: 1fr; }
        #small { display: none; height: 1fr; }
    }
    PageScreen.-small > * { display: none; }
    PageScreen.-small > #small { display: block; }
    """

    def __init__(self, pages: Sequence[Page], device: str = "") -> None:
        """Show the last of the pages; the escape key goes back through the others.

        Args:
            pages: Each one leads to the next.
            device: Name of the device of the record, for the first line.
        """
        super().__init__()
        self._device, self._icicle = plain(device), IcicleStrip()
        self._stack = [Listing(page) for page in pages]
        self._rows, self._input = RowList(self.listing), Input(select_on_focus=False)
        self._submit: Callable[[str], None] = lambda _words: None

    @property
    def listing(self) -> Listing:
        """The page that is shown, with its state."""
        return self._stack[-1]

    @property
    def path(self) -> tuple[str, ...]:
        """The titles of the pages that lead to this one, and its own."""
        return tuple(listing.page.title for listing in self._stack)

    def compose(self) -> ComposeResult:
        """Yield the widgets from top to bottom."""
        yield Static(id="place")
        yield Static(id="facts")
        yield self._icicle
        yield self._rows
        yield Static(id="note")
        yield Static(id="status")
        with Horizontal(id="prompt"):
            yield Static(id="question")
            yield self._input
        yield KeyLine()
        yield Static(id="small")

    def on_resize(self) -> None:
        """Fill the widgets, or say that the terminal is too small."""
        width, height = self.size
        self.set_class(width < LEAST_WIDTH or height < LEAST_HEIGHT, "-small")
        needed = f"{LEAST_WIDTH} x {LEAST_HEIGHT} are needed"
        self._set_text("small", f"terminal too small: {width} x {height}, {needed}")
        self._show_page()

    def on_row_list_clicked(self, event: RowList.Clicked) -> None:
        """Show the selected row; open it after a double click."""
        self._show_selection()
        if event.opens:
            self.action_enter()

    def on_icicle_strip_clicked(self, event: IcicleStrip.Clicked) -> None:
        """Select the first node of the module that was clicked."""
        at = row_at(self.listing, event.box)
        if at is None:
            self._say(f"no visible row runs in {event.box.name}")
        else:
            self.listing.go(at)
            self._follow()

    def check_action(self, action: str, _parameters: tuple[object, ...]) -> bool | None:
        """Disable all keys but two while the user types."""
        return not self._is_typing or action in _WHILE_TYPING

    def action_move(self, step: int, unit: str) -> None:
        """Select the row that is one row, one screen or the whole list away."""
        rows = {"row": 1, "page": self._rows.num_rows, "end": len(self.listing.lines)}[unit]
        self.listing.go(self.listing.at + step * rows)
        self._follow()

    def action_do(self, verb: str) -> None:
        """Call a method of the listing that changes its state, or zoom and pan its time."""
        listing = zoomed(self.listing, verb)
        if listing:
            is_moved = listing.at != self.listing.at
            self._turn(listing)
            self._rows.follow(at_top=is_moved)
        else:
            getattr(self.listing, verb)()
            self._show_rows()

    def action_enter(self) -> None:
        """Open the page of the selected row; without one, expand or collapse the row."""
        row = self.listing.row
        if row and row.make_children and "open" not in row.links:
            self.action_do("close" if self.listing.is_open(row) else "open")
        else:
            self.action_view("open")

    def action_view(self, name: str) -> None:
        """Go to the linked page of that name, or say why there is none."""
        link = self.listing.page.link(name, self.listing.row)
        if callable(link):
            self._push(link())
        else:
            self._say(link or f"{name}: this row leads to no such page")

    def action_help(self) -> None:
        """Show the page of all keys."""
        self._push(help_page())

    def action_back(self) -> None:
        """Leave the prompt, or else this page."""
        if self._is_typing:
            self._close_prompt()
            self._show_selection()
        elif len(self._stack) > 1:
            self._stack.pop()
            self._show_page()
        else:
            self._say("this is the first page; q leaves")

    def action_sibling(self, step: int) -> None:
        """Show the next page of the same kind in the same state."""
        siblings = self.listing.page.siblings
        if siblings is None or siblings.count < 2:
            self._say("there is no other page of this kind")
            return
        page, state = siblings.make((siblings.index + step) % siblings.count), self.listing.state
        self._turn(Listing(page, replace(state, opened=state.opened | page.opened)))

    def action_search(self) -> None:
        """Ask for words to search for."""
        self._ask("search", self.listing.state.search, self._search)

    def action_match(self, step: int) -> None:
        """Select the next row that contains the words of the search."""
        if self.listing.state.search:
            self._show_match(self.listing.next_match(step))
        else:
            self._say("there is no search; / starts one")

    def action_filter(self) -> None:
        """Ask for words that visible rows must contain."""
        self._ask("filter", self.listing.state.filter, self._filter)

    def action_export(self) -> None:
        """Ask for the name of a file, and write the page to it."""
        self._ask("write to", unused_name(self.path), self._export)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Close the prompt and use its text."""
        self._close_prompt()
        self._submit(event.value)

    @property
    def _is_typing(self) -> bool:
        return self._input.has_focus

    def _ask(self, question: str, text: str, submit: Callable[[str], None]) -> None:
        self._submit = submit
        self._set_text("question", f"{question}:")
        self._input.value = text
        self._input.cursor_position = len(text)
        self.query_one("#prompt").display = True
        self._input.focus()

    def _close_prompt(self) -> None:
        self.query_one("#prompt").display = False
        self.set_focus(None)

    def _search(self, words: str) -> None:
        self._show_match(self.listing.search(words))

    def _filter(self, words: str) -> None:
        self.listing.filter(words)
        self._show_rows()

    def _export(self, name: str) -> None:
        self._show_selection()
        if name.strip():
            self._say(write_new(name, listing_text(self.path, self.listing)))

    def _push(self, page: Page) -> None:
        self._stack.append(Listing(page))
        self._show_page()

    def _turn(self, listing: Listing) -> None:
        """Show another listing in place of this one."""
        self._stack[-1] = listing
        self._show_page()

    def _follow(self) -> None:
        """Bring the selected row into sight, and its time into the window."""
        listing = followed(self.listing)
        if listing:
            self._turn(listing)
        else:
            self._rows.follow()
            self._show_selection()

    def _show_match(self, is_found: bool) -> None:
        self._rows.update()
        self._follow()
        if self.listing.state.search and not is_found:
            self._say(f"no row contains {self.listing.state.search!r}")

    def _show_page(self) -> None:
        page = self.listing.page
        self._set_text("facts", pack((f"{n} {text}" for n, text in page.facts), self.size.width))
        self._rows.listing = self.listing
        self._show_rows()

    def _show_rows(self) -> None:
        self._rows.update()
        self._show_selection()

    def _show_selection(self) -> None:
        row, (width, height) = self.listing.row, self.size
        nodes, window = row.nodes if row else (), self.listing.page.window
        most = max(2, height // (8 if window else 4))
        code = plain(source_line(nodes[0].source) if len(nodes) == 1 else source_sentence(nodes))
        note = fold(plain(row.note) if row else "", width, most - bool(code))
        self._set_text("note", f"{note}\n{clip(code, width)}" if code else note)
        crumbs = [listing.page.crumb or listing.page.title for listing in self._stack]
        self.query_one("#place", Static).update(
            place_line(crumbs, common_module(nodes), self._device, width)
        )
        time = nodes[0].start_us if nodes else None
        self._icicle.show(window, time, height // 5)
        self._say(SEPARATOR.join(self.listing.status))

    def _say(self, text: str) -> None:
        self._set_text("status", fold(plain(text), self.size.width, _STATUS_LINES))

    def _set_text(self, name: str, text: str) -> None:
        self.query_one(f"#{name}", Static).update(Text(text))
