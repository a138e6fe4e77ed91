"""Where one stands: what is shown, which rows of it, and how."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich.cells import cell_len

from graphkit.tui.clip import clip_left
from graphkit.tui.listing import Listing
from graphkit.views.figures import plain

_DOT = " · "


def packed(facts: Iterable[str], width: int) -> str:
    """Facts in as few lines as hold each of them whole, as far as they fit a line at all."""
    lines: list[str] = []
    for fact in map(plain, facts):
        longer = f"{lines[-1]}{_DOT}{fact}" if lines else ""
        if lines and cell_len(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(fact)
    return "\n".join(lines)


def standing(path: Sequence[str], listing: Listing, width: int) -> str:
    """The way here, and the place, order, filter and match; the way is cut where that is long."""
    how = _DOT.join(_parts(listing))
    room = max(0, width - cell_len(how) - len(_DOT))
    way = clip_left(" > ".join(map(plain, path)), room)
    return plain(f"{way}{_DOT}{how}" if way else how)


def _parts(listing: Listing) -> Iterator[str]:
    look, count = listing.look, len(listing.lines)
    yield f"row {listing.at + 1 if count else 0}/{count:,}"
    beside = listing.page.beside
    if beside and beside.count > 1:
        yield f"tab {beside.at + 1}/{beside.count}"
    if look.sort or look.is_reversed:
        yield f"sort {look.sort or 'none'}{' reversed' if look.is_reversed else ''}"
    if look.filter:
        yield f"filter {look.filter}"
    if look.search:
        yield f"match {listing.match_at}/{len(listing.matches)} {look.search}"
