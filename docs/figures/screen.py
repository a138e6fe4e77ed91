"""Takes the picture of the screen: ``python docs/figures/screen.py`` writes ``screen.svg``."""

from __future__ import annotations

import asyncio
from pathlib import Path

from graphkit.records import load_record
from graphkit.tui import InspectApp
from graphkit.views.exports import offline

HERE = Path(__file__).parent
RECORD = HERE.parents[1] / "tests" / "data" / "h200-8b-step.json"
SIZE = 110, 32
KEYS = ("t", "down", "down")
"""The timeline. The chosen node has no source, which may change."""


async def picture() -> str:
    """Return the screen as SVG."""
    app = InspectApp(load_record(RECORD), mode="STEP", batch_size=1)
    async with app.run_test(size=SIZE) as pilot:
        await pilot.press(*KEYS)
        await pilot.pause()
        return offline(app.export_screenshot(title="graphkit inspect"))


if __name__ == "__main__":
    (HERE / "screen.svg").write_text(asyncio.run(picture()), encoding="utf-8")
