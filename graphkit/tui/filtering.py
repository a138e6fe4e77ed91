"""Search for the words of a filter or a search in rows."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

_WORD = re.compile(r"\w+")
Match = Callable[[Sequence[str], str], bool]
"""True if a row, given as its cells and its note, contains the words."""


def matcher(words: str, columns: Sequence[str]) -> Match | None:
    """Return the test for rows that contain every word, in any case; ``None`` for no words.

    ``name:part`` searches only the column with the word ``name`` in its heading. A name that no
    column has, as in ``at::native``, is searched as text.
    """
    names = [_WORD.findall(name.casefold()) for name in columns]
    tests = [_test(word.casefold(), names) for word in words.split()]
    return (lambda cells, note: all(test(cells, note) for test in tests)) if tests else None


def _test(word: str, names: Sequence[Sequence[str]]) -> Match:
    name, _, part = word.partition(":")
    column = next((at for at, words in enumerate(names) if name in words), None)
    if part and column is not None:
        return lambda cells, _note: part in cells[column].casefold()
    return lambda cells, note: any(word in text.casefold() for text in (*cells, note))
