"""Tokenizers: their interface, and that of the reference model, whose tokens are bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from graphkit.engine import SamplingParams
from graphkit.errors import CheckpointError, InputError

VOCAB_SIZE = 256
END_OF_TEXT = 0
"""Separator between the files of the training corpus."""


class Tokenizer(Protocol):
    """Converts text to token ids and back.

    Text may contain lone surrogates from ``surrogateescape``, one per byte that is not UTF-8.

    Attributes:
        stop_ids: Tokens that end a text.
    """

    stop_ids: frozenset[int]

    def sampling_params(self, **changes: Any) -> SamplingParams:
        """Return the sampling parameters of the model's texts, its stop tokens among them.

        Args:
            **changes: Arguments of ``SamplingParams`` that replace them.

        Raises:
            ConfigError: A value is out of range.
        """

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, with the special tokens that start one.

        Raises:
            InputError: The text cannot be encoded.
        """

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the token ids of a chat, up to the start of the reply.

        Args:
            messages: Each with a ``role`` and a ``content``, and what else the template reads.

        Raises:
            CheckpointError: The model has no chat template, or it cannot be rendered.
            InputError: The text cannot be encoded.
        """

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens.

        Bytes that are not UTF-8 become U+FFFD, also those of a character that is not complete yet.
        """


class ByteTokenizer:
    """Tokenizer whose token ids are the values of bytes, with the interface ``Tokenizer``."""

    stop_ids = frozenset({END_OF_TEXT})

    def sampling_params(self, **changes: Any) -> SamplingParams:
        """Return the parameters, with ``END_OF_TEXT`` as the stop token."""
        return SamplingParams(**{"stop_token_ids": self.stop_ids, **changes})

    def encode(self, text: str) -> list[int]:
        """Return the UTF-8 bytes of a text, or ``END_OF_TEXT`` for an empty one."""
        return encode(text) or [END_OF_TEXT]

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:  # noqa: ARG002
        """Refuse the messages: models of bytes have no chat template."""
        raise CheckpointError(
            "a model whose tokens are bytes has no chat template. Pass the prompt as plain text."
        )

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of bytes; see ``decode``."""
        return decode(ids)


def encode(text: str) -> list[int]:
    """Return the UTF-8 bytes of ``text`` as token ids.

    Raises:
        InputError: The text contains a surrogate that is not a byte of ``surrogateescape``.
    """
    try:
        return list(text.encode(errors="surrogateescape"))
    except UnicodeEncodeError as error:
        raise InputError(
            f"the text is not valid Unicode: {error.reason} at position {error.start}. Remove the "
            "character.",
            field="text",
        ) from error


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
