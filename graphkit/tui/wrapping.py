"""Facts and notes on lines of a given width."""

from __future__ import annotations

from collections.abc import Iterable

from rich.cells import cell_len
from textual.content import Content

from graphkit.views.columns import clip
from graphkit.views.formatting import plain

SEPARATOR = " · "


def pack(texts: Iterable[str], width: int) -> str:
    """Join texts into as few lines as possible without breaking any of them."""
    lines: list[str] = []
    for text in map(plain, texts):
        longer = f"{lines[-1]}{SEPARATOR}{text}" if lines else ""
        if lines and cell_len(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(text)
    return "\n".join(lines)


def fold(text: str, width: int, max_lines: int) -> str:
    """Break text into at most ``max_lines`` lines; more text ends in an ellipsis."""
    lines = [line.plain for line in Content(text).wrap(max(width, 1))]
    if len(lines) > max_lines:
        lines[max_lines - 1 :] = [clip(f"{lines[max_lines - 1].rstrip()}…", width)]
    return "\n".join(lines)
