"""A view as a text file."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from graphkit.tui.listing import Listing
from graphkit.tui.standing import standing
from graphkit.tui.table import Place, heads, laid_out, row_cells, wanted_widths
from graphkit.views.figures import plain

_WIDEST = 10_000
_OUTSIDE_NAMES = re.compile(r"[^A-Za-z0-9]+")


def view_text(path: Sequence[str], listing: Listing) -> str:
    """Every row that scrolling would show, with every column, nothing cut off."""
    return "".join(f"{line.rstrip()}\n" for line in _lines(path, listing))


def _lines(path: Sequence[str], listing: Listing) -> Iterator[str]:
    yield standing(path, listing, _WIDEST)
    yield from map(plain, listing.page.facts)
    yield ""
    places = [Place(at, width) for at, width in enumerate(wanted_widths(listing))]
    rows = (row_cells(listing, line) for line in listing.lines)
    for cells in (heads(listing), *rows):
        yield "".join(laid_out(cells, listing.page.columns, places))
    if not listing.lines:
        yield listing.empty


def free_name(path: Sequence[str]) -> str:
    """A file name after the view, such as ``graphkit-tiny-decode-8.txt``, that is not taken."""
    words = _OUTSIDE_NAMES.sub("-", " ".join(path)).strip("-").lower()[:80]
    stem, number = f"graphkit-{words}", 1
    name = f"{stem}.txt"
    while Path(name).exists():
        number += 1
        name = f"{stem}-{number}.txt"
    return name


def write_new(name: str, text: str) -> str:
    """Write a file that is not there yet, or nothing; returns a sentence that says which."""
    try:
        path = Path(name).expanduser()
        file = path.open("x", encoding="utf-8")
    except FileExistsError:
        return f"{name} is there already: choose another name"
    except (OSError, ValueError, RuntimeError) as error:  # a null byte, a home that is unknown
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
