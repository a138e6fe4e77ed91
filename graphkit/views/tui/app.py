"""The application."""

from __future__ import annotations

from textual.app import App

from graphkit.records import RecordWithGraphs
from graphkit.views.pages import initial_pages
from graphkit.views.tui.screen import PageScreen


class InspectApp(App[None]):
    """Shows a record that holds graphs."""

    ENABLE_COMMAND_PALETTE = False
    TITLE = "graphkit"

    def __init__(
        self,
        record: RecordWithGraphs,
        *,
        mode: str | None = None,
        batch_size: int | None = None,
        by: str = "module",
    ) -> None:
        """Open with the whole record, or with the graph of a mode and size on top of it.

        Raises:
            ConfigError: The record has no such mode or size.
        """
        # The terminal's own colours, dark or light. textual renamed "textual-ansi" to "ansi-dark".
        super().__init__(ansi_color=True)
        self.theme = next(name for name in self.available_themes if "ansi" in name)
        self._device = record.environment.device
        self._pages = initial_pages(record, mode=mode, batch_size=batch_size, by=by)

    async def on_mount(self) -> None:
        """Show the first pages."""
        await self.push_screen(PageScreen(self._pages, self._device))
