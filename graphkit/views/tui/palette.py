"""Styles in the terminal's own colours; each repeats what text, length or place says as well."""

from __future__ import annotations

from rich.style import Style

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


def part_style(part: str) -> Style:
    """Return the colour of a part of a step; none for an empty name."""
    return Style(color=_PARTS.get(part))


def heat_style(share: float | None) -> Style:
    """Return the style of a share of all time: hot from 20 %, warm from 5 %, dim below 1 %."""
    if share is None:
        return Style()
    return next((style for least, style in _HEAT if share >= least), _COOL)
