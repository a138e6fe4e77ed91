"""Text in a given number of terminal cells."""

from __future__ import annotations

from rich.cells import cell_len, set_cell_size
from textual.content import Content


def clip(text: str, width: int) -> str:
    """The text in exactly so many cells; what does not fit ends in an ellipsis."""
    if text.isascii() and len(text) <= width:
        return text.ljust(width)
    if cell_len(text) <= width:
        return set_cell_size(text, width)
    return set_cell_size(set_cell_size(text, max(width - 1, 0)).rstrip() + "…", width)


def clip_left(text: str, width: int) -> str:
    """The end of the text in at most so many cells; an ellipsis stands for what is lost."""
    if cell_len(text) <= width:
        return text
    kept, room = len(text), width - 1
    while kept and room >= cell_len(text[kept - 1]):
        kept -= 1
        room -= cell_len(text[kept])
    return f"…{text[kept:]}" if width > 0 else ""


def folded(text: str, width: int, most: int) -> str:
    """The text on lines of so many cells, of which there are at most so many."""
    lines = [line.plain for line in Content(text).wrap(max(width, 1))]
    if len(lines) > most:
        lines[most - 1 :] = [clip(f"{lines[most - 1].rstrip()}…", width)]
    return "\n".join(lines)
