"""The last line of the screen: the keys that fit, in the order of their bindings."""

from __future__ import annotations

from collections.abc import Iterator

from rich.cells import cell_len
from textual import events
from textual.app import ComposeResult
from textual.widget import Widget
from textual.widgets import Footer


class KeyLine(Footer):
    """A footer without keys that the edge of the screen would cut. ``?`` lists all keys."""

    def __init__(self) -> None:
        super().__init__(compact=True)
        self._width = 0

    def compose(self) -> ComposeResult:
        """Yield the keys that fit whole."""
        yield from self._fitting(super().compose())

    def on_resize(self, event: events.Resize) -> None:
        """Choose the keys again after a change of the width."""
        if event.size.width != self._width:
            self.call_after_refresh(self.recompose)

    def _fitting(self, keys: ComposeResult) -> Iterator[Widget]:
        self._width = room = self.app.size.width
        for key in keys:
            texts = (getattr(key, name, "") for name in ("key_display", "description"))
            room -= cell_len(" ".join(texts)) + 1
            if room < -1:  # no space is needed behind the last one
                return
            yield key
