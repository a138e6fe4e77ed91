"""The live screen: the views of one record, each on the one that it was reached from."""

from __future__ import annotations

from textual.app import App

from graphkit.records import RecordWithGraphs
from graphkit.tui.screen import ListingScreen
from graphkit.views.pages import first_pages


class InspectApp(App[None]):
    """Shows a record that holds graphs. Needs nothing else: no GPU, no model."""

    ENABLE_COMMAND_PALETTE = False
    TITLE = "graphkit"

    def __init__(
        self, record: RecordWithGraphs, *, mode: str | None = None, batch_size: int | None = None
    ) -> None:
        """Begin with the whole record, or with the graph of a mode and size.

        Raises:
            ConfigError: The record has no such mode or size.
        """
        super().__init__(ansi_color=True)  # the terminal's own colours, dark or light
        self._pages = first_pages(record, mode=mode, batch_size=batch_size)

    async def on_mount(self) -> None:
        """Show the first pages, the last one on top."""
        above: tuple[str, ...] = ()
        for page in self._pages:
            await self.push_screen(ListingScreen(page, above))
            above = (*above, page.title)
