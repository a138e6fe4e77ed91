"""Lines of a tree with figures beside them. A rich table would take a second for 2,000 of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len, chop_cells, set_cell_size
from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment
from rich.style import Style

from graphkit.views.figures import bar

_BOLD = Style(bold=True)
_BAR = 8
_NARROWEST = 12
"""Cells that names get at least, though the figures beside them leave less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line.

    Attributes:
        name: Folded where it does not fit.
        depth: How far it is indented.
        is_head: Whether it is a module, which others lie below.
        time: In the column of numbers.
        share: Of one, as a bar.
        others: Figures in columns of text.
    """

    name: str
    depth: int
    is_head: bool
    time: str
    share: float
    others: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TreeLines:
    """The lines below their heads: name, time, share and others, in columns."""

    heads: Line
    lines: Sequence[Line]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        rows = [self.heads, *self.lines]
        times = [row.time for row in rows]
        figures = [_widest(times), *map(_widest, zip(*(row.others for row in rows), strict=True))]
        left = options.max_width - sum(figures) - 2 * (len(figures) + 1)
        room = max(min(_BAR, left - _NARROWEST), 0)
        longest = max(2 * row.depth + cell_len(row.name) for row in rows)
        name = min(longest, max(left - room, _NARROWEST))
        for row in rows:
            share = "share" if row is self.heads else bar(row.share, room, options.ascii_only)
            first, *folded = _folded(row, name)
            texts = (first, row.time.rjust(figures[0]), share, *row.others)
            cells = map(set_cell_size, texts, (name, figures[0], room, *figures[1:]))
            for line in ("  ".join(cells).rstrip(), *folded):
                yield Segment(line, _BOLD if row.is_head else None)
                yield Segment.line()


def _widest(texts: Iterable[str]) -> int:
    return max(map(cell_len, texts))


def _folded(row: Line, width: int) -> Iterator[str]:
    indent = "  " * min(row.depth, max(width - _NARROWEST, 0) // 2)
    for part in chop_cells(row.name, max(width - len(indent), 1)) or [""]:
        yield indent + part
