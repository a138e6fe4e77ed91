"""Time on the screen: the modules of a replay above its timeline, zoom and pan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby

from rich.cells import set_cell_size
from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.message import Message
from textual.strip import Strip
from textual.widget import Widget

from graphkit.records import Node
from graphkit.views.formatting import plain
from graphkit.views.module_runs import Box, Level
from graphkit.views.pages import Page, Row, Window
from graphkit.views.tui.listing import Listing
from graphkit.views.tui.texts import part_style

_SELECTED = Style(bold=True, underline=True)
_FULL = 0.9
"""Share of the window from which on a box fills it."""
_ACTS: dict[str, Callable[[Window, float], Page]] = {
    "open_all": lambda window, at: window.zoomed(0.5, at),
    "close_all": lambda window, at: window.zoomed(2.0, at),
    "open": lambda window, _at: window.moved(0.25),
    "close": lambda window, _at: window.moved(-0.25),
}
"""What the verbs of a listing do on such a page; it has no rows to expand."""


class IcicleStrip(Widget, can_focus=False):
    """Draws modules as boxes in a window of time; the selected node's boxes are underlined.

    Reads one box per cell, so that the number of nodes does not matter.
    """

    DEFAULT_CSS = "IcicleStrip { display: none; }"

    class Clicked(Message):
        """The mouse chose the box of a module."""

        def __init__(self, box: Box) -> None:
            super().__init__()
            self.box = box

    def __init__(self) -> None:
        super().__init__()
        self._window: Window | None = None
        self._levels: list[Level] = []
        self._time: float | None = None

    def show(self, window: Window | None, time: float | None, most: int) -> None:
        """Show a window of time in at most that many lines; hide without a window.

        Args:
            window: The window, with its modules.
            time: When the selected node starts, in us.
            most: Largest number of lines. Levels that one box fills are left out first.
        """
        self._window, self._time = window, time
        self._levels = _chosen(window, most) if window else []
        self.display = bool(self._levels)
        self.styles.height = len(self._levels)
        self.refresh()

    def render_line(self, y: int) -> Strip:
        """Draw the boxes of one depth."""
        if self._window is None or y >= len(self._levels):
            return Strip.blank(self.size.width)
        segments = self._segments(self._levels[y], self._window)
        return Strip(segments).adjust_cell_length(self.size.width)

    def on_click(self, event: events.Click) -> None:
        """Choose the box under the mouse."""
        if self._window is None or event.y >= len(self._levels):
            return
        box = self._box(self._levels[event.y], self._window, event.x)
        if box:
            self.post_message(self.Clicked(box))

    def _box(self, level: Level, window: Window, x: int) -> Box | None:
        """Return the box in the middle of a cell."""
        cell = (window.end - window.begin) / max(self.size.width, 1)
        return level.at(window.begin + (x + 0.5) * cell)

    def _segments(self, level: Level, window: Window) -> Iterator[Segment]:
        boxes = (self._box(level, window, x) for x in range(self.size.width))
        for box, run in groupby(boxes):
            length = sum(1 for _ in run)
            if box is None:
                yield Segment(" " * length)
            else:
                text = f"▏{plain(box.name)} " + "─" * length * (not box.part)
                yield Segment(set_cell_size(text, length), self._style(box))

    def _style(self, box: Box) -> Style:
        style = part_style(box.part) + Style(reverse=bool(box.part))
        is_selected = self._time is not None and box.begin <= self._time < box.end
        return style + _SELECTED if is_selected else style


def _chosen(window: Window, most: int) -> list[Level]:
    """Return the levels to draw, outermost first; those that one box nearly fills say least."""
    levels = list(window.icicle)
    while len(levels) > max(most, 0):
        shares = ((level.largest_share(window.begin, window.end), level) for level in levels)
        levels.remove(next((level for share, level in shares if share >= _FULL), levels[-1]))
    return levels


def zoomed(listing: Listing, verb: str) -> Listing | None:
    """Return the listing with another window of time; ``None`` if the verb is not about time.

    Zooming keeps the selected node in the middle, or the middle of the window if it is outside.
    A node that leaves the window gives the selection to the nearest one in it.
    """
    window = listing.page.window
    if window is None or verb not in _ACTS:
        return None
    time, middle = _time(listing), (window.begin + window.end) / 2
    is_inside = time is not None and window.begin <= time < window.end
    at = time if time is not None and is_inside else middle
    other = Listing(_ACTS[verb](window, at), listing.state)
    other.go(_nearest_in_window(other))
    return other


def _nearest_in_window(listing: Listing) -> int:
    """Return the position of the selected row, or of the nearest one that runs in the window.

    In a window in which no node runs, that is the last row before it.
    """
    window = listing.page.window
    nodes = [(line.row.nodes[0], at) for at, line in enumerate(listing.lines) if line.row.nodes]
    if window is None or not nodes:
        return listing.at
    inside = [at for node, at in nodes if _is_inside(node, window)]
    if listing.at in inside:
        return listing.at
    before = (at for node, at in nodes if (node.start_us or 0.0) < window.begin)
    return min(inside, key=lambda at: abs(at - listing.at)) if inside else max(before, default=0)


def _is_inside(node: Node, window: Window) -> bool:
    return node.end_us > window.begin and (node.start_us or 0.0) < window.end


def followed(listing: Listing) -> Listing | None:
    """Return the listing with the selected node in the middle of its window.

    ``None`` if the node lies in the window already, or the page has none.
    """
    window, time = listing.page.window, _time(listing)
    if window is None or time is None or window.begin <= time <= window.end:
        return None
    return Listing(window.zoomed(1.0, time), listing.state)


def row_at(listing: Listing, box: Box) -> int | None:
    """Return the position of the first row whose nodes run in a box; ``None`` without one."""
    times = enumerate(_start(line.row) for line in listing.lines)
    inside = {at: t for at, t in times if t is not None and box.begin <= t < box.end}
    return min(inside, key=inside.__getitem__, default=None)


def _time(listing: Listing) -> float | None:
    """Return when the selected node starts, in us."""
    return _start(listing.row) if listing.row else None


def _start(row: Row) -> float | None:
    return row.nodes[0].start_us if row.nodes else None
