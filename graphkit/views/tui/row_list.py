"""The widget that draws a listing: headings, rows, and the selected row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.geometry import Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from graphkit.views.pages.page_model import Column, Row
from graphkit.views.text.page import GAP, TONES, ColumnSpan, align_cells, fit, widest
from graphkit.views.tui.listing import Listing
from graphkit.views.tui.texts import HEADING, SELECTED, heat_style, part_style

_MARGIN = 2
"""Cells to the left of a row, for the mark of the selected one."""
_CHUNK = 100
"""Rows for which columns keep their widths while scrolling."""


class RowList(ScrollView, can_focus=False, inherit_bindings=False):
    """Draws the rows that are in sight, and formats no others.

    Textual's ``DataTable`` formats every row when it is added: 10,000 rows of ten columns take
    2 s, 100,000 take 19 s, again after every sort. Its ``Tree`` has no columns.
    """

    DEFAULT_CSS = """
    RowList { height: 1fr; overflow-x: hidden; overflow-y: auto; scrollbar-gutter: stable;
              scrollbar-size-vertical: 1; &:nocolor { scrollbar-size-vertical: 0; } }
    """

    class Clicked(Message):
        """The mouse sorted the listing or selected a row; ``opens`` for a double click."""

        def __init__(self, *, opens: bool) -> None:
            super().__init__()
            self.opens = opens

    def __init__(self, listing: Listing) -> None:
        super().__init__()
        self.listing = listing
        self._fitted: tuple[int, ...] = ()
        self._spans: tuple[ColumnSpan, ...] = ()

    @property
    def num_rows(self) -> int:
        """Number of rows in sight."""
        return max(1, self.size.height - 1)

    def update(self) -> None:
        """Draw the rows again after they changed."""
        self.virtual_size = Size(0, len(self.listing.lines) + 1)
        self._fitted = ()
        self.follow()

    def follow(self) -> None:
        """Scroll to the selected row, and draw."""
        first = min(self.scroll_offset.y, self.listing.at)
        first = max(first, self.listing.at + 1 - self.num_rows)
        self.scroll_to(y=first, animate=False, force=True)
        self._fit_columns()
        self.refresh()

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        """Fit the columns to the rows that come into sight."""
        super().watch_scroll_y(old_value, new_value)
        self._fit_columns()

    def on_resize(self) -> None:
        """Show the columns that fit now."""
        self.update()

    def on_click(self, event: events.Click) -> None:
        """Sort by the clicked heading, or select the clicked row."""
        at = self.scroll_offset.y + event.y - 1
        if event.y == 0:
            self._sort_by_heading_at(event.x - _MARGIN)
        elif at < len(self.listing.lines):
            self.listing.go(at)
        else:
            return
        self.update()
        self.post_message(self.Clicked(opens=bool(event.y) and event.chain == 2))

    def render_line(self, y: int) -> Strip:
        """Draw the headings, or one of the rows below them."""
        at = self.scroll_offset.y + y - 1
        if y == 0:
            segments = self._headings()
        elif at < len(self.listing.lines):
            segments = self._row(at)
        elif at == 0:
            segments = iter([Segment(f"  {self.listing.empty}", TONES["faint"])])
        else:
            segments = iter(())
        return Strip(segments).adjust_cell_length(self.size.width)

    def _fit_columns(self) -> None:
        """Fit the columns to a chunk of rows around those in sight, once per chunk."""
        room = self.scrollable_content_region.width - _MARGIN
        first, lines = self.scroll_offset.y // _CHUNK * _CHUNK, self.listing.lines
        chunk = lines[first : first + _CHUNK + self.num_rows]
        fitted = (first, len(chunk), room)
        if fitted != self._fitted:
            self._fitted = fitted
            rows = [self.listing.headings, *map(self.listing.line_cells, chunk)]
            self._spans = fit(self.listing.page.columns, widest(rows), room)

    def _sort_by_heading_at(self, x: int) -> None:
        for span in self._spans:
            if 0 <= x < span.width:
                self.listing.sort_by_or_reverse(self.listing.page.columns[span.index].name)
                return
            x -= span.width + GAP

    def _headings(self) -> Iterator[Segment]:
        yield Segment("  ", HEADING)
        yield from (Segment(text, HEADING) for text in self._aligned(self.listing.headings))

    def _row(self, at: int) -> Iterator[Segment]:
        line, columns = self.listing.lines[at], self.listing.page.columns
        cells, row = list(self.listing.line_cells(line)), line.row
        for span in self._spans:
            draw, value = columns[span.index].draw, row.values[span.index]
            if draw and value is not None:
                cells[span.index] = draw(value, span.width)
        is_selected = at == self.listing.at
        whole = SELECTED if is_selected else TONES[row.tone]
        yield Segment("> " if is_selected else "  ", whole)
        for span, text in zip(self._spans, self._aligned(cells), strict=False):
            tint = Style() if is_selected else _tint(columns[span.index], row, span.index)
            yield Segment(text, whole + tint)

    def _aligned(self, cells: Sequence[str]) -> Iterator[str]:
        return align_cells(cells, self.listing.page.columns, self._spans)


def _tint(column: Column, row: Row, index: int) -> Style:
    if column.tint == "heat":
        return heat_style(row.values[index])
    return part_style(row.part) if column.tint == "part" else Style()
