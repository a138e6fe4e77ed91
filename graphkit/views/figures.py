"""How numbers, shares, extents and foreign text look, in every view alike."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from graphkit.records import count_of, extent
from graphkit.views.generate import visible

__all__ = ["bar", "count_of", "extent", "facts", "listed", "plain", "size", "table", "us"]

_EIGHTHS = " ▏▎▍▌▋▊▉"


def us(value: float | None) -> str:
    """Microseconds; ``-`` if they were not measured."""
    return "-" if value is None else f"{value:,.2f}"


def size(num_bytes: float) -> str:
    """Such as ``1.5 KiB``."""
    for unit in ("bytes", "KiB", "MiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:,.0f} bytes" if unit == "bytes" else f"{num_bytes:,.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:,.1f} GiB"


def bar(share: float, width: int, ascii_only: bool = False) -> str:
    """A share of one as a bar of at most so many cells; none for what is no share, such as NaN."""
    share = min(1.0, max(0.0, share))  # in this order: NaN is not more than 0.0
    full, rest = divmod(round(share * width * 8), 8)
    if ascii_only:
        return "#" * (full + (rest >= 4))
    return "█" * full + _EIGHTHS[rest].strip()


def plain(text: str) -> str:
    """Text of a record as one line that a terminal, a file and XML can take.

    Control characters and what is no UTF-8 are written out.
    """
    if text.isascii() and text.isprintable():
        return text
    spaced = " ".join(text.replace("\t", " ").splitlines())
    return visible(spaced).encode("utf-8", "backslashreplace").decode("utf-8")


def listed(names: Sequence[str], most: int = 20) -> str:
    """Names in a sentence; beyond ``most`` they are counted."""
    more = [f"and {len(names) - most} more"] if len(names) > most else []
    return ", ".join([*names[:most], *more])


def facts(rows: Sequence[tuple[str, str]]) -> Table:
    """Names and what there is to say of each."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in rows:
        table.add_row(Text(name), Text(text))
    return table


def table(left: Sequence[str], right: Sequence[str] = (), title: str = "") -> Table:
    """An empty table with columns of text and then of numbers; narrow ones fold, nothing is cut."""
    made = Table(
        title=Text(title, style="bold") if title else None,
        title_justify="left",
        title_style="",
        box=None,
        pad_edge=False,
        padding=(0, 2, 0, 0),
        header_style="",
    )
    for name in left:
        made.add_column(name, overflow="fold")
    for name in right:
        made.add_column(name, overflow="fold", justify="right")
    return made
