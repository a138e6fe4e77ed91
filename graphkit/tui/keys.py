"""Every key of the screen, once: what is bound, what the footer says and what the help says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

_GAP = "  "
_SHORT = {"pageup": "pgup", "pagedown": "pgdn", "escape": "esc", "shift+tab": "shift-tab"}


class Key(NamedTuple):
    """One or more keys that do the same.

    Attributes:
        keys: As textual names them, with commas between.
        action: What the screen does, as textual writes actions.
        label: That in a word, for the footer.
        meaning: That in a sentence.
        rank: Where the footer is short, the highest rank goes first; 0 is never in it.
    """

    keys: str
    action: str
    label: str
    meaning: str
    rank: int = 0

    @property
    def shown(self) -> str:
        """The keys as people write them."""
        return " ".join(_SHORT.get(key, key) for key in self.keys.split(","))


KEYS = (
    Key("enter", "enter", "open", "go deeper: to a graph, to a node; else open or close", 3),
    Key("escape", "back", "back", "go back one view", 9),
    Key("tab", "beside(1)", "next", "the next of its kind: size, node, mode or pair", 10),
    Key("shift+tab", "beside(-1)", "previous", "the one before"),
    Key("b", "view('buffers')", "buffers", "the input buffers of the mode", 6),
    Key("c", "view('compare')", "compare", "what changed since another size; tab takes more", 5),
    Key("m", "view('memory')", "memory", "the memory that the graph points into", 11),
    Key("up,k", "move(-1, 'row')", "up", "the row above"),
    Key("down,j", "move(1, 'row')", "down", "the row below"),
    Key("pageup", "move(-1, 'page')", "page up", "one page up"),
    Key("pagedown", "move(1, 'page')", "page down", "one page down"),
    Key("home,g", "move(-1, 'end')", "first", "the first row"),
    Key("end,G", "move(1, 'end')", "last", "the last row"),
    Key("right,l", "do('open')", "expand", "show what is in the row"),
    Key("left,h", "do('close')", "collapse", "hide what is in the row, or go to the row it is in"),
    Key("+", "do('open_all')", "expand", "show what is in all rows", 12),
    Key("-", "do('close_all')", "collapse", "show the outermost rows only", 13),
    Key("/", "search", "search", "look for words, in closed rows, too; name:word in one column", 4),
    Key("n", "match(1)", "next match", "the next row that holds them"),
    Key("N", "match(-1)", "previous match", "the one before"),
    Key("s", "do('sort_next')", "sort", "sort by the next column, as a click on its head does", 7),
    Key("S", "do('reverse')", "reverse", "turn the order round"),
    Key("f", "filter", "filter", "keep rows that hold words, as in kind:memcpy; none keep all", 8),
    Key("e", "export", "export", "write the view as text to a file", 14),
    Key("?", "help", "help", "this list", 1),
    Key("q", "app.quit", "quit", "leave", 2),
    Key("ctrl+c", "app.quit", "quit", "leave, also while words are typed"),
)  # fmt: skip


def footer(width: int) -> str:
    """What the keys do, as much of it as so many cells have room for."""
    shown = sorted((key for key in KEYS if key.rank), key=lambda key: key.rank)
    while shown and len(_line(shown)) > width:
        shown.pop()
    return _line(shown)


def _line(shown: list[Key]) -> str:
    return _GAP.join(_words(shown))


def _words(shown: list[Key]) -> Iterator[str]:
    """In the table's order, whatever their rank."""
    for key in KEYS:
        if key in shown:
            yield f"{key.shown.split()[0]} {key.label}"
