"""Texts around the list: the first line, facts and notes in lines of a width."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile

from rich.cells import cell_len
from rich.text import Text
from textual.content import Content

from graphkit.records import Node
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


_ARROW, _MORE = " > ", "…"
_LEAST_MODULE = 10
"""Cells for the module, its arrow included, below which it is left out."""


def place_line(crumbs: Sequence[str], module: str, device: str, width: int) -> Text:
    """Return the path of pages and the module of the selected row, and on the right the device.

    Where they do not fit, the device is left out first, then the outermost pages.
    """
    names = [plain(crumb) for crumb in crumbs]
    paths = [names, *([_MORE, *names[at:]] for at in range(1, len(names)))]
    fitting = (path for path in paths if cell_len(_ARROW.join(path)) <= width)
    *around, page = next(fitting, paths[-1])
    before = "".join(crumb + _ARROW for crumb in around)
    has_device = device and cell_len(before + page) <= width - cell_len(device) - 2
    room = width - (cell_len(device) + 2) * bool(has_device)
    is_wide = module and room - cell_len(before + page) >= _LEAST_MODULE
    inside = plain(f"{_ARROW}{module}") if is_wide else ""
    text = clip(before + page + inside, room) + (f"  {device}" if has_device else "")
    line = Text(text, style="dim", no_wrap=True)
    line.stylize("not dim bold", len(before), min(len(before + page), len(text)))
    return line


def common_module(nodes: Iterable[Node]) -> str:
    """Return the path of the innermost module that contains all of these nodes."""
    paths = [node.module.split(".") for node in nodes if node.module]
    if not paths:
        return ""
    pairs = zip(min(paths), max(paths), strict=False)  # all paths lie between these two
    return ".".join(one for one, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
