"""Draws the figures of the page Concepts: ``python docs/figures/draw.py`` writes the SVG files.

The pages include the files as they are, so that their colours follow the theme of the page.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

WIDTH = 720
STYLE = """
svg.figure { max-width: 100%; height: auto; font: 13px system-ui, sans-serif }
svg.figure text { fill: var(--pst-color-text-base, #24292f); text-anchor: middle }
svg.figure text.start { text-anchor: start }
svg.figure .box { fill: var(--pst-color-surface, #f3f4f5); stroke: #7a8490 }
svg.figure .gpu { fill: #3b82c433; stroke: #3b82c4 }
svg.figure .live { fill: #2f9e6b33; stroke: #2f9e6b }
svg.figure .pad { fill: #d9822b22; stroke: #d9822b; stroke-dasharray: 4 3 }
svg.figure .line { fill: none; stroke: #7a8490; stroke-width: 1.5; marker-end: url(#tip) }
svg.figure .tip { fill: #7a8490 }
"""


class Figure:
    """Collects the shapes of a figure; coordinates are pixels from the top left corner.

    Args:
        about: What the figure shows, for readers who do not see it.
        height: Height; the width is that of all figures.
    """

    def __init__(self, about: str, height: int) -> None:
        self.about, self.height = about, height
        self.parts: list[str] = []

    def box(self, x: int, y: int, w: int, text: str = "", kind: str = "box", h: int = 34) -> None:
        """Draw a box with its text in the middle."""
        shape = f'<rect class="{kind}" x="{x}" y="{y}" width="{w}" height="{h}" rx="4"/>'
        self.parts.append(shape)
        self.text(x + w // 2, y + h // 2 + 4, text)

    def text(self, x: int, y: int, text: str, kind: str = "") -> None:
        """Draw text, centred unless ``kind`` is ``start``."""
        named = f' class="{kind}"' if kind else ""
        self.parts += [f'<text{named} x="{x}" y="{y}">{escape(text)}</text>'] if text else []

    def arrow(self, *points: int) -> None:
        """Draw a line through points, x and y in turn, with a tip at its end."""
        path = " ".join(f"{x},{y}" for x, y in zip(points[::2], points[1::2], strict=True))
        self.parts.append(f'<polyline class="line" points="{path}"/>')

    def svg(self) -> str:
        """Return the file."""
        tip = (
            '<defs><marker id="tip" markerWidth="8" markerHeight="8" refX="7" refY="4" '
            'orient="auto"><path class="tip" d="M0,0 L8,4 L0,8 z"/></marker></defs>'
        )
        body = "\n".join(self.parts)
        return (
            f'<svg class="figure" xmlns="http://www.w3.org/2000/svg" role="img" width="{WIDTH}" '
            f'height="{self.height}" viewBox="0 0 {WIDTH} {self.height}">\n'
            f"<title>{escape(self.about)}</title>\n<style>{STYLE}</style>\n{tip}\n{body}\n</svg>\n"
        )


def modes() -> Figure:
    """Draw one speculative step and the mode of each of its forwards."""
    figure = Figure("A step drafts, verifies, accepts and catches up, then starts again", 150)
    steps = [
        ("draft", "DRAFT", "gpu"),
        ("build tree", "an op", "box"),
        ("verify", "TARGET_VERIFY", "gpu"),
        ("accept", "an op", "box"),
        ("catch up", "DRAFT_EXTEND", "gpu"),
    ]
    for index, (name, mode, kind) in enumerate(steps):
        x = 10 + 142 * index
        figure.box(x, 30, 116, name, kind)
        figure.text(x + 58, 84, mode)
        if index:
            figure.arrow(x - 26, 47, x - 2, 47)
    figure.arrow(636, 95, 636, 125, 68, 125, 68, 95)
    figure.text(352, 118, "accepted tokens become the context of the next step")
    return figure


def acceptance() -> Figure:
    """Draw the rows of a verify step and what it accepts."""
    figure = Figure("Two drafts are accepted, and the bonus token follows them", 210)
    figure.text(10, 46, "rows of a verify", "start")
    figure.text(10, 126, "target's next tokens", "start")
    rows = [
        ("root: the", "cat", "live"),
        ("draft: cat", "sat", "live"),
        ("draft: sat", "on", "live"),
        ("draft: in", "the", "pad"),
    ]
    for index, (row, chosen, kind) in enumerate(rows):
        x = 190 + 130 * index
        figure.box(x, 25, 112, row, kind)
        figure.arrow(x + 56, 59, x + 56, 103)
        figure.box(x, 105, 112, chosen, "gpu" if index == 2 else kind)
    for index, equal in enumerate(("=", "=", "is not")):
        figure.text(190 + 130 * index + 121, 86, equal)
    figure.text(311, 164, "2 accepted drafts")
    figure.text(506, 164, "bonus token")
    figure.text(636, 164, "rejected")
    figure.text(440, 195, "3 accepted tokens: the accept length of this step")
    return figure


def sizes() -> Figure:
    """Draw live batch sizes and the captured sizes that hold them."""
    figure = Figure("Each live batch size runs at the smallest captured size that holds it", 150)
    captured = (1, 2, 4, 8)
    figure.text(10, 42, "live requests", "start")
    figure.text(10, 122, "captured sizes", "start")
    for live in range(1, 9):
        x = 120 + 72 * (live - 1)
        figure.box(x, 20, 52, str(live), "live")
        size = min(each for each in captured if each >= live)
        if size == live:
            figure.box(x, 100, 52, str(size), "gpu")
        figure.arrow(x + 26, 54, 120 + 72 * (size - 1) + 26, 98)
    return figure


def padding() -> Figure:
    """Draw a padded field per request and one per token."""
    figure = Figure("3 live requests in the graph of 4: the tail of each field is padded", 150)
    figure.text(10, 46, "seq_lens, per request", "start")
    figure.text(10, 96, "input_ids, per token", "start")
    for request in range(4):
        x, kind = 190 + 128 * request, "live" if request < 3 else "pad"
        figure.box(x, 25, 120, ("4", "9", "6", "fill value")[request], kind)
        for token in range(4):
            figure.box(x + 30 * token, 75, 28, "0" if request == 3 else "t", kind)
    figure.text(382, 138, "live rows: what the output has")
    figure.text(634, 138, "pad rows: slot 0, row 0")
    return figure


def refresh() -> Figure:
    """Draw the way of a batch from the host into the graph."""
    figure = Figure(
        "The host writes a ring entry; the first nodes of the graph copy and pad it", 190
    )
    figure.text(10, 24, "host", "start")
    figure.box(60, 40, 120, "batch")
    figure.arrow(180, 57, 238, 57)
    for entry in range(4):
        figure.box(
            240 + 44 * entry, 40, 42, "entry" if entry == 1 else "", "live" if entry == 1 else "box"
        )
    figure.text(328, 30, "ring in pinned memory")
    figure.text(10, 110, "graph", "start")
    for index, name in enumerate(("copy and pad", "metadata", "your forward", "live rows")):
        figure.box(60 + 165 * index, 125, 135, name, "gpu")
        if index:
            figure.arrow(30 + 165 * index, 142, 58 + 165 * index, 142)
    figure.arrow(305, 74, 305, 98, 127, 98, 127, 123)
    figure.text(520, 62, "one launch: no other call,")
    figure.text(520, 80, "no wait for the device")
    return figure


def fallbacks() -> Figure:
    """Draw what happens to a batch with and without a graph."""
    figure = Figure("run replays a batch with a graph, and runs the forward without one", 170)
    figure.box(20, 65, 110, "run(batch)")
    figure.box(200, 65, 150, "can_replay(batch)")
    figure.arrow(130, 82, 198, 82)
    figure.box(470, 20, 230, "replay: one launch", "gpu")
    figure.arrow(350, 75, 410, 37, 468, 37)
    figure.text(395, 30, "yes")
    figure.box(470, 68, 230, "forward without a graph", "live")
    figure.arrow(350, 85, 468, 85)
    figure.text(410, 80, "no")
    figure.text(585, 122, "counted in stats.fallbacks")
    figure.box(470, 132, 230, "InputError or ReplayError", "pad")
    figure.arrow(350, 92, 410, 149, 468, 149)
    figure.text(385, 160, "invalid")
    return figure


def generations() -> Figure:
    """Draw the times of host and device in each generation."""
    figure = Figure(
        "v1 waits for the host in each step, v2 overlaps, v3 runs many steps per launch", 250
    )
    for row, name in enumerate(("v1", "v2", "v3")):
        y = 20 + 78 * row
        figure.text(10, y + 20, f"{name} host", "start")
        figure.text(10, y + 52, "GPU", "start")
        if row == 0:
            for step in range(3):
                figure.box(90 + 210 * step, y, 90, "schedule", h=28)
                figure.box(185 + 210 * step, y + 32, 105, "step", "gpu", h=28)
        elif row == 1:
            for step in range(4):
                figure.box(90 + 125 * step, y, 90, "schedule", h=28)
                figure.box(185 + 125 * step, y + 32, 105, "step", "gpu", h=28)
        else:
            figure.box(90, y, 90, "launch", h=28)
            figure.box(190, y, 500, "read tokens as they arrive", h=28)
            for step in range(4):
                figure.box(185 + 107 * step, y + 32, 105, "step", "gpu", h=28)
    return figure


def device_loop() -> Figure:
    """Draw the loop over captured steps."""
    figure = Figure("A loop on the device picks the size of each step, until a reason to stop", 230)
    figure.box(10, 20, 700, "", "box", h=178)
    figure.text(30, 42, "one launch: while there is no reason to stop", "start")
    figure.box(40, 95, 140, "requests left?", "gpu")
    for row, size in enumerate((2, 4, 8)):
        figure.box(270, 55 + 42 * row, 150, f"step of size {size}", "gpu")
        figure.arrow(180, 112, 225, 112, 225, 72 + 42 * row, 268, 72 + 42 * row)
        figure.arrow(420, 72 + 42 * row, 460, 72 + 42 * row, 460, 112, 508, 112)
    figure.box(510, 95, 180, "write tokens, count", "gpu")
    figure.arrow(690, 112, 702, 112, 702, 186, 20, 186, 20, 112, 38, 112)
    figure.text(
        360, 220, "stop: N steps done, a request ended, the host asks, the output ring is full"
    )
    return figure


FIGURES = (modes, acceptance, sizes, padding, refresh, fallbacks, generations, device_loop)


def main() -> None:
    """Write all figures."""
    for draw in FIGURES:
        path = Path(__file__).with_name(f"{draw.__name__}.svg")
        path.write_text(draw().svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
