"""The widget that draws the modules of a replay above its timeline, one line per depth."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from rich.cells import set_cell_size
from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.message import Message
from textual.strip import Strip
from textual.widget import Widget

from graphkit.views.formatting import plain
from graphkit.views.module_runs import Box, Level
from graphkit.views.pages import Window
from graphkit.views.tui.texts import part_style

_SELECTED = Style(bold=True, underline=True)
_FULL = 0.9
"""Share of the window from which on a box fills it."""


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
