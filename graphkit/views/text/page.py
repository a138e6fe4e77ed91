"""A page as text for a pipe: the table that the screen shows, with every row, nothing clipped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rich.cells import cell_len, chop_cells, set_cell_size
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.segment import Segment
from rich.style import Style
from rich.text import Text

from graphkit.views.formatting import facts_table, plain
from graphkit.views.lines import GAP, ColumnSpan, Line, fit, flatten, widest
from graphkit.views.pages.page_model import Page, Row

TONES = {
    "": Style(),
    "good": Style(color="green"),
    "warning": Style(color="yellow"),
    "bad": Style(color="red", bold=True),
    "faint": Style(dim=True),
}
"""Styles of rows; each repeats in colour what the text says."""
_BOLD = Style(bold=True)
_ASCII_BAR = str.maketrans("█▉▊▋▌▍▎▏", "#### " + " " * 3)


def page_view(page: Page, *, is_expanded: bool = True) -> RenderableType:
    """Return title, facts, table and notes of a page.

    Args:
        page: Any page.
        is_expanded: Shows the rows inside every row, except inside runs of equal rows; if False,
            inside those that the screen opens at first.
    """
    table = _Table(page, is_expanded) if page.rows else Text(plain(page.empty))
    return Group(
        Text(plain(page.title), style="bold"),
        facts_table(page.facts),
        *([""] if page.facts else []),
        table,
        *(Text(plain(note)) for note in page.notes),
    )


@dataclass(frozen=True, slots=True)
class _Table:
    """The rows below the names of the columns. Rich's own table takes 0.5 ms per row."""

    page: Page
    is_expanded: bool

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = list(flatten(self.page.rows, is_open=self._is_open))
        heads = tuple(column.name for column in self.page.columns)
        rows = [heads, *(_indented(self.page.cells(line.row), line) for line in lines)]
        wanted = widest(rows)
        columns = [
            replace(column, least=min(column.least, width))
            for column, width in zip(self.page.columns, wanted, strict=True)
        ]
        spans = [
            ColumnSpan(span.index, min(span.width, wanted[span.index]))
            for span in fit(columns, wanted, options.max_width)
        ]
        styles = [_BOLD, *(_style(line) for line in lines)]
        for cells, style in zip(rows, styles, strict=True):
            for text in self._folded(cells, spans):
                yield Segment(text.translate(_ASCII_BAR) if options.ascii_only else text, style)
                yield Segment.line()

    def _is_open(self, row: Row) -> bool:
        return not row.is_run if self.is_expanded else row.key in self.page.opened

    def _folded(self, cells: Sequence[str], spans: Sequence[ColumnSpan]) -> Iterator[str]:
        """Yield the lines of a row; texts that are wider than their column continue below."""
        columns = [_chopped(cells[span.index], span.width) for span in spans]
        for number in range(max(map(len, columns))):
            texts = []
            for column, span in zip(columns, spans, strict=True):
                text = column[number] if number < len(column) else ""
                is_number = self.page.columns[span.index].is_number
                texts.append(
                    " " * (span.width - cell_len(text)) + text
                    if is_number
                    else set_cell_size(text, span.width)
                )
            yield (" " * GAP).join(texts).rstrip()


def _indented(cells: tuple[str, ...], line: Line) -> tuple[str, ...]:
    first, *others = cells
    return "  " * len(line.parents) + first, *others


def _chopped(text: str, width: int) -> list[str]:
    """Return the text in pieces of at most ``width`` cells; the indentation is repeated."""
    if cell_len(text) <= width:
        return [text]
    name = text.lstrip(" ")
    indent = " " * min(len(text) - len(name), width // 2)
    return [indent + piece for piece in chop_cells(name, max(width - len(indent), 1))]


def _style(line: Line) -> Style:
    return TONES[line.row.tone] + _BOLD if line.row.make_children else TONES[line.row.tone]
