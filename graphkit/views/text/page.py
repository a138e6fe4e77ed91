"""A page as text: its rows as lines, the columns that fit, and the table for a pipe."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.segment import Segment
from rich.style import Style
from rich.text import Text

from graphkit.views.formatting import facts_table, plain
from graphkit.views.pages.page_model import Column, Page, Row

TONES = {
    "": Style(),
    "good": Style(color="green"),
    "warning": Style(color="yellow"),
    "bad": Style(color="red", bold=True),
    "faint": Style(dim=True),
}
"""Styles of rows; each repeats in colour what the text says."""
Order = Callable[[Sequence[Row]], Sequence[Row]]
"""Sorts the rows of one parent."""
_Test = Callable[[Row], bool]
GAP = 2
"""Cells between two columns."""
_BOLD = Style(bold=True)
LARGE = 500
"""Number of nodes from which on a picture of each node is too large to read."""
_ASCII_BAR = str.maketrans("█▉▊▋▌▍▎▏", "#### " + " " * 3)


@dataclass(frozen=True, slots=True)
class Line:
    """A visible row, and the keys of the rows around it, outermost first."""

    row: Row
    parents: tuple[str, ...]


def flatten(
    rows: Sequence[Row],
    *,
    is_open: _Test = lambda _row: True,
    is_kept: _Test = lambda _row: True,
    order: Order = lambda rows: rows,
    parents: tuple[str, ...] = (),
) -> Iterator[Line]:
    """Yield the rows to keep, in an order, and after each open one the rows inside it."""
    for row in order(rows):
        if is_kept(row):
            yield Line(row, parents)
            if row.make_children and is_open(row):
                yield from flatten(
                    row.children,
                    is_open=is_open,
                    is_kept=is_kept,
                    order=order,
                    parents=(*parents, row.key),
                )


def keys_around(lines: Iterable[Line]) -> frozenset[str]:
    """Return the keys of all rows that contain these."""
    return frozenset(key for line in lines for key in line.parents)


@dataclass(frozen=True, slots=True)
class ColumnSpan:
    """A column that fits: its index among the page's columns, and its width in cells."""

    index: int
    width: int


def fit(columns: Sequence[Column], wanted: Sequence[int], room: int) -> tuple[ColumnSpan, ...]:
    """Return the columns that fit into a line, in order, with their widths.

    Columns are left out by ``rank`` until the narrowest widths fit. Columns of rank 0 stay: if they
    need more than the line, the widest are narrowed. What is left widens the columns that were
    narrow, in order, then the column with ``least``. ``wanted`` are the widths of the widest texts.
    """
    pairs = zip(columns, wanted, strict=True)
    full = [column.least or min(want, column.most) for column, want in pairs]
    widths = {i: min(width, columns[i].narrow or width) for i, width in enumerate(full)}
    while _spare(widths, room) < 0:
        rank, index = max((columns[i].rank, i) for i in widths)
        if rank == 0:
            break
        del widths[index]
    while _spare(widths, room) < 0 < max(widths.values()):
        widths[max(widths, key=widths.__getitem__)] -= 1
    for i in widths:
        widths[i] += max(0, min(_spare(widths, room), full[i] - widths[i]))
    spare = max(0, _spare(widths, room))
    return tuple(ColumnSpan(i, w + spare * bool(columns[i].least)) for i, w in widths.items())


def _spare(widths: dict[int, int], room: int) -> int:
    return room - sum(widths.values()) - GAP * (len(widths) - 1)


def widest(rows: Sequence[Sequence[str]]) -> list[int]:
    """Return the width of the widest text of each column, in cells."""
    return [max(map(cell_len, texts)) for texts in zip(*rows, strict=True)]


def align_cells(
    cells: Sequence[str] | Mapping[int, str],
    columns: Sequence[Column],
    spans: Sequence[ColumnSpan],
) -> Iterator[str]:
    """Yield the texts of a row, each padded or clipped to its column and followed by the gap.

    ``cells`` has them by index of the column. The last one extends over the empty cells after it.
    """
    last = max((n for n, span in enumerate(spans) if cells[span.index]), default=0)
    for n, span in enumerate(spans):
        text, width = cells[span.index], span.width
        if columns[span.index].is_number:
            text = " " * (width - cell_len(text)) + text
        if n == last:
            rest = sum(GAP + other.width for other in spans[n + 1 :])
            yield clip(text, width + rest)
            return
        yield clip(text, width) + " " * GAP


def clip(text: str, width: int) -> str:
    """Return the text in exactly ``width`` cells; text that does not fit ends in an ellipsis."""
    if text.isascii() and len(text) <= width:
        return text.ljust(width)
    if cell_len(text) <= width:
        return set_cell_size(text, width)
    return set_cell_size(set_cell_size(text, max(width - 1, 0)).rstrip() + "…", width)


def page_view(page: Page, *, is_expanded: bool = True) -> RenderableType:
    """Return title, facts, table and notes of a page.

    Shows the rows inside every row, except inside runs of equal rows; if not ``is_expanded``,
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
            for text in self._folded(cells, spans, console):
                yield Segment(text.translate(_ASCII_BAR) if options.ascii_only else text, style)
                yield Segment.line()

    def _is_open(self, row: Row) -> bool:
        return not row.is_run if self.is_expanded else row.key in self.page.opened

    def _folded(
        self, cells: Sequence[str], spans: Sequence[ColumnSpan], console: Console
    ) -> Iterator[str]:
        """Yield the lines of a row; texts that are wider than their column continue below."""
        last = max((n for n, span in enumerate(spans) if cells[span.index]), default=0)
        rest = sum(GAP + span.width for span in spans[last + 1 :])
        if rest and not self.page.columns[spans[last].index].is_number:  # over the empty cells
            spans = [*spans[:last], ColumnSpan(spans[last].index, spans[last].width + rest)]
        columns = [_wrapped(cells[span.index], span.width, console) for span in spans]
        indices = [span.index for span in spans]
        for texts in zip_longest(*columns, fillvalue=""):
            line = dict(zip(indices, texts, strict=True))
            yield "".join(align_cells(line, self.page.columns, spans)).rstrip()


def _indented(cells: tuple[str, ...], line: Line) -> tuple[str, ...]:
    first, *others = cells
    return "  " * len(line.parents) + first, *others


def _wrapped(text: str, width: int, console: Console) -> list[str]:
    """Return the text in lines of at most ``width`` cells; the indentation is repeated."""
    if cell_len(text) <= width:
        return [text]
    name = text.lstrip(" ")
    indent = " " * min(len(text) - len(name), width // 2)
    lines = Text(name).wrap(console, max(width - len(indent), 1))
    return [indent + line.plain.rstrip() for line in lines]


def _style(line: Line) -> Style:
    return TONES[line.row.tone] + _BOLD if line.row.make_children else TONES[line.row.tone]
