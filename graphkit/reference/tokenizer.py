"""The byte-level vocabulary of the reference model: a token is a byte, its id the byte's value."""

from __future__ import annotations

from collections.abc import Iterable

from graphkit.errors import InputError

VOCAB_SIZE = 256
END_OF_TEXT = 0
"""Stands between the files that the reference model was trained on."""


def encode(text: str) -> list[int]:
    """Return the UTF-8 bytes of ``text`` as token ids."""
    return list(text.encode())


def decode(ids: Iterable[int]) -> str:
    """Return the text of ``ids``; bytes that are not UTF-8 become U+FFFD.

    Raises:
        InputError: An id is not a byte.
    """
    try:
        return bytes(list(ids)).decode(errors="replace")
    except ValueError as error:
        raise InputError(f"ids must lie in 0 .. 255: {error}.", field="ids") from error
