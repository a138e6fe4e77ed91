"""Prompts of a given length."""

from __future__ import annotations

from collections.abc import Sequence


def pieces(ids: Sequence[int], count: int, length: int) -> list[list[int]]:
    """Return ``count`` pieces of a text, each of ``length`` tokens, at different places of it.

    Args:
        ids: Token ids of the text, at least one; a text that is too short is repeated.
        count: Number of pieces.
        length: Tokens of each piece.
    """
    text = list(ids) * -(-(length + count) // len(ids))
    distance = (len(text) - length) // count
    return [text[start : start + length] for start in range(0, count * distance, distance)]
