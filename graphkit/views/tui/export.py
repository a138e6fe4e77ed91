"""A page as a text file."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from graphkit.views.formatting import plain
from graphkit.views.lines import ColumnSpan, align_cells, widest
from graphkit.views.tui.listing import Listing
from graphkit.views.tui.texts import SEPARATOR

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9]+")


def listing_text(path: Sequence[str], listing: Listing) -> str:
    """Return all visible rows with every column, nothing clipped.

    Args:
        path: Titles of the pages that lead to this one, and its own.
        listing: The page in its state.
    """
    return "".join(f"{line.rstrip()}\n" for line in _lines(path, listing))


def _lines(path: Sequence[str], listing: Listing) -> Iterator[str]:
    yield SEPARATOR.join([plain(" > ".join(path)), *listing.status])
    yield from (plain(f"{name} {text}") for name, text in listing.page.facts)
    yield ""
    rows = [listing.headings, *map(listing.line_cells, listing.lines)]
    spans = [ColumnSpan(index, width) for index, width in enumerate(widest(rows))]
    for cells in rows:
        yield "".join(align_cells(cells, listing.page.columns, spans))
    if not listing.lines:
        yield listing.empty


def unused_name(path: Sequence[str]) -> str:
    """Return a name for a new file, such as ``graphkit-tiny-decode-8.txt``."""
    words = _NOT_IN_NAMES.sub("-", " ".join(path)).strip("-").lower()[:80]
    stem, number = f"graphkit-{words}", 1
    name = f"{stem}.txt"
    while Path(name).exists():
        number += 1
        name = f"{stem}-{number}.txt"
    return name


def write_new(name: str, text: str) -> str:
    """Write a new file; return a sentence that says where it is or why there is none."""
    try:
        path = Path(name).expanduser()
        file = path.open("x", encoding="utf-8")
    except FileExistsError:
        return f"{name} exists: choose another name"
    except (OSError, ValueError, RuntimeError) as error:  # a null byte, an unknown user's home
        return f"cannot write {name}: {_reason(error)}"
    try:
        with file:
            file.write(text)
    except OSError as error:
        path.unlink()
        return f"cannot write {name}: {_reason(error)}"
    return f"wrote {path.resolve()}"


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
