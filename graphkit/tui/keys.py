"""Table of all keys, from which the screen's bindings, footer and help page are made."""

from __future__ import annotations

from typing import NamedTuple

from textual.binding import Binding, BindingType

from graphkit.views.pages import Column, Page, Row

_SHORT = {"pageup": "pgup", "pagedown": "pgdn", "escape": "esc", "shift+tab": "shift-tab"}


class Key(NamedTuple):
    """Keys with one action.

    Attributes:
        keys: Names in textual, separated by commas.
        action: Action of the screen, as textual writes it.
        label: One or two words for the footer.
        meaning: A sentence for the help page.
        is_shown: True if the footer shows it.
    """

    keys: str
    action: str
    label: str
    meaning: str
    is_shown: bool = False

    @property
    def display(self) -> str:
        """The keys as users know them."""
        return " ".join(_SHORT.get(key, key) for key in self.keys.split(","))


# The footer shows as many as fit, from the first on.
KEYS = (
    Key("enter", "enter", "open", "open the graph or node of the row; else expand it", True),
    Key("?", "help", "help", "list all keys", True),
    Key("q", "app.quit", "quit", "leave", True),
    Key("escape", "back", "back", "go back to the page before", True),
    Key("/", "search", "search", "search rows, collapsed ones too; name:word in one column", True),
    Key("f", "filter", "filter", "show only rows with words, as in kind:memcpy; none: all", True),
    Key("s", "do('sort_next')", "sort", "sort by the next column, as a click on its head", True),
    Key("tab", "sibling(1)", "next", "next page of the kind: size, node, mode or pair", True),
    Key("c", "view('compare')", "compare", "compare with another size; tab steps on", True),
    Key("b", "view('buffers')", "buffers", "input buffers of the mode", True),
    Key("m", "view('memory')", "memory", "memory that the graph points to", True),
    Key("+", "do('open_all')", "expand", "expand all rows", True),
    Key("-", "do('close_all')", "collapse", "collapse all rows", True),
    Key("e", "export", "export", "write the page to a text file", True),
    Key("shift+tab", "sibling(-1)", "previous", "previous page of the kind"),
    Key("up,k", "move(-1, 'row')", "up", "previous row"),
    Key("down,j", "move(1, 'row')", "down", "next row"),
    Key("pageup", "move(-1, 'page')", "page up", "one screen up"),
    Key("pagedown", "move(1, 'page')", "page down", "one screen down"),
    Key("home,g", "move(-1, 'end')", "first", "first row"),
    Key("end,G", "move(1, 'end')", "last", "last row"),
    Key("right,l", "do('open')", "expand", "expand the row"),
    Key("left,h", "do('close')", "collapse", "collapse the row, or go to the row around it"),
    Key("n", "match(1)", "next match", "next row with the words of the search"),
    Key("N", "match(-1)", "previous match", "previous row with them"),
    Key("S", "do('reverse')", "reverse", "reverse the order"),
    Key("ctrl+c", "app.quit", "quit", "leave, also while typing"),
)

BINDINGS: list[BindingType] = [
    Binding(
        key.keys,
        key.action,
        key.label,
        show=key.is_shown,
        key_display=key.display,
        priority=key.keys == "ctrl+c",
    )
    for key in KEYS
]


def help_page() -> Page:
    """Return the page of all keys."""
    return Page(
        title="keys",
        columns=(Column(name="key"), Column(name="action", least=24)),
        rows=tuple(
            Row(key=key.keys, values=(key.display, key.meaning), note=key.meaning) for key in KEYS
        ),
    )
