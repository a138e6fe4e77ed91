"""Text of numbers, shares and names from records, and the two shapes of rich tables."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from rich.table import Table
from rich.text import Text

_EIGHTHS = " ▏▎▍▌▋▊▉"
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""C0, C1 and delete, without newline and tab: a terminal obeys them."""


def us(value: float | None) -> str:
    """Return microseconds as text; ``-`` if they were not measured."""
    return number(value, ",.2f")


def number(value: float | None, spec: str) -> str:
    """Return a number in a format; ``-`` if there is none."""
    return "-" if value is None else format(value, spec)


def within_one(share: float) -> float:
    """Return a share between 0 and 1; 0 for NaN."""
    return min(1.0, max(0.0, share))  # in this order: NaN is not more than 0.0


def size(num_bytes: float) -> str:
    """Return a number of bytes with its unit, such as ``1.5 KiB``."""
    for unit in ("bytes", "KiB", "MiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:,.0f} bytes" if unit == "bytes" else f"{num_bytes:,.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:,.1f} GiB"


def bar(share: float, width: int) -> str:
    """Return a share of one as a bar of at most ``width`` cells; NaN has none."""
    full, rest = divmod(round(within_one(share) * width * 8), 8)
    return "█" * full + _EIGHTHS[rest].strip()


def visible(text: str) -> str:
    r"""Return the text with control characters written out, such as ``\x1b``."""
    return _CONTROLS.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def plain(text: str) -> str:
    """Return a record's text as one line that a terminal, a file and XML accept.

    Control characters and surrogates are written out.
    """
    if text.isascii() and text.isprintable():
        return text
    spaced = " ".join(text.replace("\t", " ").splitlines())
    return visible(spaced).encode("utf-8", "backslashreplace").decode("utf-8")


def facts_table(facts: Iterable[tuple[str, str]]) -> Table:
    """Return names and texts side by side; long texts fold."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in facts:
        table.add_row(Text(plain(name)), Text(plain(text)))
    return table


def text_table(left: Sequence[str], right: Sequence[str] = (), title: str = "") -> Table:
    """Return an empty table with columns of text, then of numbers; narrow columns fold."""
    table = Table(
        title=Text(title, style="bold") if title else None,
        title_justify="left",
        title_style="",
        box=None,
        pad_edge=False,
        padding=(0, 2, 0, 0),
        header_style="",
    )
    for name in left:
        table.add_column(name, overflow="fold")
    for name in right:
        table.add_column(name, overflow="fold", justify="right")
    return table
