"""The widget that draws a listing: heads, rows, and a mark on the selected one."""

from __future__ import annotations

from collections.abc import Iterator

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.geometry import Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from graphkit.tui.lines import Line
from graphkit.tui.listing import Listing
from graphkit.tui.table import GAP, Place, fit, heads, laid_out, row_cells, wanted_widths

_MARGIN = 2
"""Cells left of a row, for the mark on the selected one."""
_HEAD = Style(bold=True, underline=True)
_SELECTED = Style(reverse=True)
_TONES = {
    "": Style(),
    "good": Style(color="green"),
    "warning": Style(color="yellow"),
    "bad": Style(color="red", bold=True),
    "faint": Style(dim=True),
}
"""The terminal's own colours, so that they suit its background."""


class Sheet(ScrollView, can_focus=False, inherit_bindings=False):
    """Draws only the rows that are seen, so that their number does not matter."""

    DEFAULT_CSS = """
    Sheet { height: 1fr; overflow-x: hidden; overflow-y: auto; scrollbar-gutter: stable;
            scrollbar-size-vertical: 1; scrollbar-background: ansi_default;
            scrollbar-background-hover: ansi_default; scrollbar-background-active: ansi_default;
            scrollbar-color: ansi_bright_black; scrollbar-color-hover: ansi_default;
            scrollbar-color-active: ansi_default;
            &:nocolor { scrollbar-size-vertical: 0; } }
    """

    class Touched(Message):
        """The mouse sorted the listing or selected a row of it; ``opens`` on a double click."""

        def __init__(self, *, opens: bool) -> None:
            super().__init__()
            self.opens = opens

    def __init__(self, listing: Listing) -> None:
        super().__init__()
        self.listing = listing
        self._places: tuple[Place, ...] = ()

    @property
    def num_rows(self) -> int:
        """How many rows are seen at once."""
        return max(1, self.size.height - 1)

    def update(self) -> None:
        """Draw the listing's rows anew, after they changed."""
        self.virtual_size = Size(0, len(self.listing.lines) + 1)
        room = self.scrollable_content_region.width - _MARGIN
        self._places = fit(self.listing.page.columns, wanted_widths(self.listing), room)
        self.follow()

    def follow(self) -> None:
        """Draw with the selected row among those that are seen."""
        first = min(self.scroll_offset.y, self.listing.at)
        first = max(first, self.listing.at + 1 - self.num_rows)
        self.scroll_to(y=first, animate=False, force=True)
        self.refresh()

    def on_resize(self) -> None:
        """Take the columns that there is room for now."""
        self.update()

    def on_click(self, event: events.Click) -> None:
        """Sort by the head, or select the row, that was clicked."""
        at = self.scroll_offset.y + event.y - 1
        if event.y == 0:
            self._sort_by_head_at(event.x - _MARGIN)
        elif at < len(self.listing.lines):
            self.listing.go(at)
        else:
            return
        self.update()
        self.post_message(self.Touched(opens=bool(event.y) and event.chain == 2))

    def _sort_by_head_at(self, x: int) -> None:
        for place in self._places:
            if 0 <= x < place.width:
                self.listing.sort_by_or_reverse(self.listing.page.columns[place.at].name)
                return
            x -= place.width + GAP

    def render_line(self, y: int) -> Strip:
        """The heads on top, then the rows from where it is scrolled to."""
        at = self.scroll_offset.y + y - 1
        if y == 0:
            segments = self._segments("  ", heads(self.listing), _HEAD)
        elif at < len(self.listing.lines):
            segments = self._row(at)
        elif at == 0:
            segments = iter([Segment(f"  {self.listing.empty}", _TONES["faint"])])
        else:
            segments = iter(())
        return Strip(segments).adjust_cell_length(self.size.width)

    def _row(self, at: int) -> Iterator[Segment]:
        line: Line = self.listing.lines[at]
        is_selected = at == self.listing.at
        style = _SELECTED if is_selected else _TONES[line.item.tone]
        return self._segments("> " if is_selected else "  ", row_cells(self.listing, line), style)

    def _segments(self, margin: str, cells: tuple[str, ...], style: Style) -> Iterator[Segment]:
        yield Segment(margin, style)
        for text in laid_out(cells, self.listing.page.columns, self._places):
            yield Segment(text, style)
