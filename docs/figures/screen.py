"""Takes the picture of the screen, ``docs/inspect.svg``: ``python docs/figures/screen.py``."""

from __future__ import annotations

import asyncio
from pathlib import Path

from graphkit.records import load_record
from graphkit.views.exports import offline
from graphkit.views.tui import InspectApp

DOCS = Path(__file__).parents[1]
RECORD = DOCS.parent / "tests" / "data" / "h200-8b-step.json"
SIZE = 108, 30
STEPS = 4, 2, 1, 2, 1, 2
KEYS = tuple(key for steps in STEPS for key in (*("down",) * steps, "right"))
"""Opens verify, its target and model, the layers, the first one, and attention in it. A
module is selected: for a node, the screen shows the text of a line from this machine's file, which
may change."""


async def picture() -> str:
    """Return the screen as SVG, equal in every run."""
    app = InspectApp(load_record(RECORD), mode="STEP", batch_size=1)
    async with app.run_test(size=SIZE) as pilot:
        await pilot.press(*KEYS)
        await pilot.pause()
        return offline(app.export_screenshot(title="graphkit inspect"))


if __name__ == "__main__":
    (DOCS / "inspect.svg").write_text(asyncio.run(picture()), encoding="utf-8")
