"""A renderable as an SVG that loads nothing from elsewhere and is the same from run to run."""

from __future__ import annotations

import io
import re

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console, RenderableType

_FONT_FACES = re.compile(r"@font-face\s*{{.*?}}", re.DOTALL)
_NOT_XML = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")
# rich's own format names a web font; a file that people open offline must not.
_FORMAT = _FONT_FACES.sub("", CONSOLE_SVG_FORMAT).replace("Fira Code", "ui-monospace")


def svg_of(view: RenderableType, *, title: str, width: int = 100) -> str:
    """The view as SVG text, ``width`` columns wide."""
    console = Console(
        record=True,
        width=width,
        file=io.StringIO(),
        force_terminal=True,
        color_system="truecolor",
        _environ={},
    )
    console.print(view)
    svg = console.export_svg(title=title, code_format=_FORMAT, unique_id="graphkit")
    return _NOT_XML.sub("", svg)
