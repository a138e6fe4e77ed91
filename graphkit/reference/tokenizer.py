"""Byte-level tokenizer of the reference model: a token id is the value of a byte."""

from __future__ import annotations

from collections.abc import Iterable

from graphkit.errors import InputError

VOCAB_SIZE = 256
END_OF_TEXT = 0
"""Separator between the files of the training corpus."""


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
        raise InputError(
            f"token ids of the byte tokenizer must be ints from 0 to 255: {error}. Decode "
            "output of the reference models only.",
            field="ids",
        ) from error
