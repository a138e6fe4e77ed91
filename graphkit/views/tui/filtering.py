"""Rows that contain the words of a filter or a search, and the sum of their nodes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from graphkit.records import count_of
from graphkit.views.formatting import us
from graphkit.views.lines import Line
from graphkit.views.module_tree import total_us
from graphkit.views.pages import Page

_WORD = re.compile(r"\w+")
Match = Callable[[Sequence[str], str], bool]
"""Returns whether a row contains the words, from its cells and its note."""


def matcher(words: str, columns: Sequence[str]) -> Match | None:
    """Return the test for rows that contain every word, in any case; ``None`` for no words.

    ``name:part`` searches only the column with the word ``name`` in its heading. A name that no
    column has, as in ``at::native``, is searched as text.
    """
    names = [_WORD.findall(name.casefold()) for name in columns]
    tests = [_test(word.casefold(), names) for word in words.split()]
    return (lambda cells, note: all(test(cells, note) for test in tests)) if tests else None


def sum_text(page: Page, lines: Iterable[Line]) -> str:
    """Return number, time in us and share of the rows' nodes, as text; empty if the page has none.

    A node in several of the rows, such as its own row and its module's, counts once.
    """
    if not page.nodes:
        return ""
    nodes = {node.index: node for line in lines for node in line.row.nodes}.values()
    time, whole = total_us(nodes), total_us(page.nodes)
    parts = [count_of(len(nodes), "node")]
    if time is not None:
        parts.append(f"{us(time)} us")
        if whole is not None and whole > 0:
            parts.append(f"{time / whole:.1%}")
    return ", ".join(parts)


def _test(word: str, names: Sequence[Sequence[str]]) -> Match:
    name, _, part = word.partition(":")
    column = next((index for index, words in enumerate(names) if name in words), None)
    if part and column is not None:
        return lambda cells, _note: part in cells[column].casefold()
    return lambda cells, note: any(word in text.casefold() for text in (*cells, note))
