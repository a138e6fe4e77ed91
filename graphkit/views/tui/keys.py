"""Bindings of all keys. The footer and the help page show them."""

from __future__ import annotations

from functools import partial

from textual.binding import Binding

from graphkit.views.pages.page_model import Column, Page, Row

_MOUSE = "select a row; twice: open; on a column name: sort"
_SHORT = {"pageup": "pgup", "pagedown": "pgdn", "escape": "esc", "shift+tab": "shift-tab"}


def _key(keys: str, action: str, label: str, meaning: str, *, show: bool = True) -> Binding:
    """Bind keys, separated by commas, to an action, with texts for the footer and for the help."""
    return Binding(
        keys,
        action,
        label,
        show=show,
        key_display=" ".join(_SHORT.get(key, key) for key in keys.split(",")),
        priority=keys == "ctrl+c",
        tooltip=meaning,
    )


_hidden = partial(_key, show=False)
KEYS = (
    # The footer has these; it scrolls where they do not fit.
    _key("enter", "enter", "open", "open the graph or node of the row; else expand it"),
    _key("?", "help", "help", "list all keys"),
    _key("q", "app.quit", "quit", "leave"),
    _key("escape", "back", "back", "go back to the page before"),
    _key("/", "filter", "filter", "show only rows with words, as in kind:memcpy; none: all"),
    _key("s", "do('sort_next')", "sort", "sort by the next column, as a click on its name"),
    _key("tab", "sibling(1)", "next", "next page of the kind: size, node, mode or pair"),
    _key("K", "view('kernels')", "kernels", "what each kernel of the graph costs"),
    _key("t", "view('time')", "time", "the replay as it ran: nodes and gaps in time"),
    _key("c", "view('compare')", "compare", "compare with another size; tab steps on"),
    _key("b", "view('buffers')", "buffers", "input buffers of the mode"),
    _key("m", "view('memory')", "memory", "memory that the graph points to, and when it is used"),
    _key("+", "do('open_all')", "expand", "expand all rows"),
    _key("-", "do('close_all')", "collapse", "collapse all rows"),
    # Only the help page has the others.
    _hidden("shift+tab", "sibling(-1)", "previous", "previous page of the kind"),
    _hidden("up,k", "move(-1, 'row')", "up", "previous row"),
    _hidden("down,j", "move(1, 'row')", "down", "next row"),
    _hidden("pageup", "move(-1, 'page')", "page up", "one screen up"),
    _hidden("pagedown", "move(1, 'page')", "page down", "one screen down"),
    _hidden("home,g", "move(-1, 'end')", "first", "first row"),
    _hidden("end,G", "move(1, 'end')", "last", "last row"),
    _hidden("right,l", "do('open')", "expand", "expand the row"),
    _hidden("left,h", "do('close')", "collapse", "collapse the row, or go to the row around it"),
    _hidden("S", "do('reverse')", "reverse", "reverse the order"),
    _hidden("ctrl+c", "app.quit", "quit", "leave, also while typing"),
)
"""Each binding has the text of the help page as its tooltip."""


def help_page() -> Page:
    """Return the page of all keys."""
    rows = [(key.key, key.key_display or key.key, key.tooltip) for key in KEYS]
    return Page(
        title="keys",
        columns=(Column(name="key"), Column(name="action", least=24)),
        rows=tuple(
            Row(key=key, values=(display, meaning), note=meaning)
            for key, display, meaning in (*rows, ("mouse", "click", _MOUSE))
        ),
    )
