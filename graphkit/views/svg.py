"""A renderable as an SVG that loads nothing and is equal in every run."""

from __future__ import annotations

import io
import re

from rich.console import Console, RenderableType

_FONT_FACES = re.compile(r"@font-face\s*{.*?}", re.DOTALL)
_NOT_XML = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")


def svg_of(view: RenderableType, *, title: str, width: int = 100) -> str:
    """Return the view as SVG text, ``width`` columns wide."""
    console = Console(
        record=True,
        width=width,
        file=io.StringIO(),
        force_terminal=True,
        color_system="truecolor",
        _environ={},
    )
    console.print(view)
    return offline(console.export_svg(title=title, unique_id="graphkit"))


def offline(svg: str) -> str:
    """Return an SVG of rich without the font of the web that it loads, and as valid XML."""
    style, end, rest = svg.partition("</style>")
    style = _FONT_FACES.sub("", style).replace("Fira Code", "ui-monospace")
    return _NOT_XML.sub("", style + end + rest)
