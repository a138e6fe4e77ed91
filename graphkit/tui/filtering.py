"""The words that a user types to find rows or to keep only some of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

_WORD = re.compile(r"\w+")
Match = Callable[[Sequence[str], str], bool]
"""Whether a row holds the words; told its cells and its note."""


def matcher(words: str, columns: Sequence[str]) -> Match | None:
    """What finds the rows that hold every word, in any case; ``None`` for no words.

    A word ``name:part`` looks for the part in the column alone that has the name's word in its
    head. A name that no column has, as in ``at::native``, is text like any other.
    """
    names = [_WORD.findall(name.casefold()) for name in columns]
    tests = [_test(word.casefold(), names) for word in words.split()]
    return (lambda cells, note: all(test(cells, note) for test in tests)) if tests else None


def _test(word: str, names: Sequence[Sequence[str]]) -> Match:
    name, _, part = word.partition(":")
    at = next((at for at, words in enumerate(names) if name in words), None)
    if part and at is not None:
        return lambda cells, _note: part in cells[at].casefold()
    return lambda cells, note: any(word in text.casefold() for text in (*cells, note))
