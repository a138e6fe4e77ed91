"""Texts around the list in lines of a width, and styles of rows in the colours of the terminal.

A style repeats what text, length or place says as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile

from rich.cells import cell_len
from rich.style import Style
from rich.text import Text
from textual.content import Content

from graphkit.records import Node
from graphkit.views.formatting import plain
from graphkit.views.text.page import clip

SEPARATOR = " · "
_ARROW, _MORE = " > ", "…"
_LEAST_MODULE = 10
"""Cells for the module, its arrow included, below which it is left out."""
HEADING = Style(bold=True, underline=True)
SELECTED = Style(reverse=True)
_PARTS = {
    "refresh": "cyan", "metadata": "bright_cyan",
    "draft": "magenta", "build": "bright_magenta", "verify": "green", "accept": "yellow",
    "extend": "blue",
    "embed": "blue", "attn": "green", "mlp": "magenta", "norm": "bright_blue", "head": "yellow",
}  # fmt: skip
_HEAT = ((0.2, Style(color="red", bold=True)), (0.05, Style(color="yellow")), (0.01, Style()))
_COOL = Style(dim=True)


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


def part_style(part: str) -> Style:
    """Return the colour of a part of a step; none for an empty name."""
    return Style(color=_PARTS.get(part))


def heat_style(share: float | None) -> Style:
    """Return the style of a share of all time: hot from 20 %, warm from 5 %, dim below 1 %."""
    if share is None:
        return Style()
    return next((style for least, style in _HEAT if share >= least), _COOL)
