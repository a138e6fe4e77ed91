"""Layout of columns in a line: which ones fit, how wide they are, and the text of each cell."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size

from graphkit.views.pages.page_model import Column

GAP = 2
"""Cells between two columns."""


@dataclass(frozen=True, slots=True)
class ColumnSpan:
    """A column that fits.

    Attributes:
        index: Its index among the page's columns.
        width: Its width in cells.
    """

    index: int
    width: int


def fit(columns: Sequence[Column], wanted: Sequence[int], room: int) -> tuple[ColumnSpan, ...]:
    """Return the columns that fit into a line, in order, with their widths.

    Columns are left out by ``rank`` until the narrowest widths fit. Columns of rank 0 stay: if they
    need more than the line, the widest are narrowed. What is left widens the columns that were
    narrow, in order, then the column with ``least``.

    Args:
        columns: All columns.
        wanted: Width of the widest text of each column, in cells.
        room: Width of the line, in cells.
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
    cells: Sequence[str], columns: Sequence[Column], spans: Sequence[ColumnSpan]
) -> Iterator[str]:
    """Yield the texts of a row, each padded or clipped to its column and followed by the gap.

    The last text extends over the empty cells that follow it.
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
