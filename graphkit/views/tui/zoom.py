"""Zoom and pan of a page that draws a window of time, with the keys that expand and collapse."""

from __future__ import annotations

from collections.abc import Callable

from graphkit.records import Node
from graphkit.views.module_runs import Box
from graphkit.views.pages import Page, Row, Window
from graphkit.views.tui.listing import Listing

_ACTS: dict[str, Callable[[Window, float], Page]] = {
    "open_all": lambda window, at: window.zoomed(0.5, at),
    "close_all": lambda window, at: window.zoomed(2.0, at),
    "open": lambda window, _at: window.moved(0.25),
    "close": lambda window, _at: window.moved(-0.25),
}
"""What the verbs of a listing do on such a page; it has no rows to expand."""


def zoomed(listing: Listing, verb: str) -> Listing | None:
    """Return the listing with another window of time; ``None`` if the verb is not about time.

    Zooming keeps the selected node in the middle, or the middle of the window if it is outside.
    A node that leaves the window gives the selection to the nearest one in it.
    """
    window = listing.page.window
    if window is None or verb not in _ACTS:
        return None
    time, middle = _time(listing), (window.begin + window.end) / 2
    is_inside = time is not None and window.begin <= time < window.end
    at = time if time is not None and is_inside else middle
    other = Listing(_ACTS[verb](window, at), listing.state)
    other.go(_nearest_in_window(other))
    return other


def _nearest_in_window(listing: Listing) -> int:
    """Return the position of the selected row, or of the nearest one that runs in the window.

    In a window in which no node runs, that is the last row before it.
    """
    window = listing.page.window
    nodes = [(line.row.nodes[0], at) for at, line in enumerate(listing.lines) if line.row.nodes]
    if window is None or not nodes:
        return listing.at
    inside = [at for node, at in nodes if _is_inside(node, window)]
    if listing.at in inside:
        return listing.at
    before = (at for node, at in nodes if (node.start_us or 0.0) < window.begin)
    return min(inside, key=lambda at: abs(at - listing.at)) if inside else max(before, default=0)


def _is_inside(node: Node, window: Window) -> bool:
    return node.end_us > window.begin and (node.start_us or 0.0) < window.end


def followed(listing: Listing) -> Listing | None:
    """Return the listing with the selected node in the middle of its window.

    ``None`` if the node lies in the window already, or the page has none.
    """
    window, time = listing.page.window, _time(listing)
    if window is None or time is None or window.begin <= time <= window.end:
        return None
    return Listing(window.zoomed(1.0, time), listing.state)


def row_at(listing: Listing, box: Box) -> int | None:
    """Return the position of the first row whose nodes run in a box; ``None`` without one."""
    times = enumerate(_start(line.row) for line in listing.lines)
    inside = {at: t for at, t in times if t is not None and box.begin <= t < box.end}
    return min(inside, key=inside.__getitem__, default=None)


def _time(listing: Listing) -> float | None:
    """Return when the selected node starts, in us."""
    return _start(listing.row) if listing.row else None


def _start(row: Row) -> float | None:
    return row.nodes[0].start_us if row.nodes else None
