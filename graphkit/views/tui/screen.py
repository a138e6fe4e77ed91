"""The application and its screen: a stack of pages of which the last one is shown, and its keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal
from textual.screen import Screen
from textual.widgets import Footer, Input, Static

from graphkit.records import RecordWithGraphs
from graphkit.views.formatting import plain
from graphkit.views.module_tree import source_sentence
from graphkit.views.pages.initial import initial_pages
from graphkit.views.pages.page_model import Page
from graphkit.views.source_code import source_line
from graphkit.views.text.page import clip
from graphkit.views.tui.keys import KEYS, help_page
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
        """Show the last of the pages, each of which leads to the next; escape goes back."""
        super().__init__()
        self._device = plain(device)
        self._stack = [Listing(page) for page in pages]
        self._rows, self._input = RowList(self.listing), Input(select_on_focus=False)

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
        yield self._rows
        yield Static(id="note")
        yield Static(id="status")
        with Horizontal(id="prompt"):
            yield Static("filter:", id="question")
            yield self._input
        yield Footer(compact=True)
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

    def check_action(self, action: str, _parameters: tuple[object, ...]) -> bool | None:
        """Disable all keys but two while the user types."""
        return not self._is_typing or action in _WHILE_TYPING

    def action_move(self, step: int, unit: str) -> None:
        """Select the row that is one row, one screen or the whole list away."""
        rows = {"row": 1, "page": self._rows.num_rows, "end": len(self.listing.lines)}[unit]
        self.listing.go(self.listing.at + step * rows)
        self._rows.follow()
        self._show_selection()

    def action_do(self, verb: str) -> None:
        """Call a method of the listing that changes its state."""
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
        self._stack[-1] = Listing(page, replace(state, opened=state.opened | page.opened))
        self._show_page()

    def action_filter(self) -> None:
        """Ask for words that visible rows must contain."""
        self._input.value = self.listing.state.filter
        self._input.cursor_position = len(self._input.value)
        self.query_one("#prompt").display = True
        self._input.focus()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Close the prompt, and show the rows with its words."""
        self._close_prompt()
        self.listing.filter(event.value)
        self._show_rows()

    @property
    def _is_typing(self) -> bool:
        return self._input.has_focus

    def _close_prompt(self) -> None:
        self.query_one("#prompt").display = False
        self.set_focus(None)

    def _push(self, page: Page) -> None:
        self._stack.append(Listing(page))
        self._show_page()

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
        nodes, most = row.nodes if row else (), max(2, height // 4)
        code = plain(source_line(nodes[0].source) if len(nodes) == 1 else source_sentence(nodes))
        note = fold(plain(row.note) if row else "", width, most - bool(code))
        self._set_text("note", f"{note}\n{clip(code, width)}" if code else note)
        crumbs = [listing.page.crumb or listing.page.title for listing in self._stack]
        self.query_one("#place", Static).update(
            place_line(crumbs, common_module(nodes), self._device, width)
        )
        self._say(SEPARATOR.join(self.listing.status))

    def _say(self, text: str) -> None:
        self._set_text("status", fold(plain(text), self.size.width, _STATUS_LINES))

    def _set_text(self, name: str, text: str) -> None:
        self.query_one(f"#{name}", Static).update(Text(text))


class InspectApp(App[None]):
    """Shows a record that holds graphs."""

    ENABLE_COMMAND_PALETTE = False
    TITLE = "graphkit"

    def __init__(
        self,
        record: RecordWithGraphs,
        *,
        mode: str | None = None,
        batch_size: int | None = None,
        by: str = "module",
    ) -> None:
        """Open with the whole record, or with the graph of a mode and size on top of it.

        Raises:
            ConfigError: The record has no such mode or size.
        """
        # The terminal's own colours, dark or light. textual renamed "textual-ansi" to "ansi-dark".
        super().__init__(ansi_color=True)
        self.theme = next(name for name in self.available_themes if "ansi" in name)
        self._device = record.environment.device
        self._pages = initial_pages(record, mode=mode, batch_size=batch_size, by=by)

    async def on_mount(self) -> None:
        """Show the first pages."""
        await self.push_screen(PageScreen(self._pages, self._device))
