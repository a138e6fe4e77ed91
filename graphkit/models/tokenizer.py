"""The tokenizer, the chat template and the stop tokens of a folder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from graphkit.engine import SamplingParams
from graphkit.errors import CheckpointError, InputError
from graphkit.models.generation import folder_defaults
from graphkit.models.refusals import load_error, one_line


def load_tokenizer(
    folder: str | Path, *, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a folder.

    Raises:
        CheckpointError: The folder has no tokenizer, or it cannot be loaded.
    """
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=trust_remote_code, local_files_only=True
        )
    except Exception as error:  # transformers and what it calls raise errors of many classes
        what = f"the tokenizer of {folder}"
        raise load_error(folder, error, what=what, trust_remote_code=trust_remote_code) from error
    files = tokenizer.vocab_files_names.values()
    # Without its files, transformers creates a tokenizer without tokens.
    if files and not any((Path(folder) / name).exists() for name in files):
        raise CheckpointError(
            f"{folder} contains no tokenizer: none of {', '.join(files)}. Add the files of the "
            "model."
        )
    return tokenizer


class FolderTokenizer:
    """Text as tokens of a folder.

    The stop tokens are ``eos_token_id`` of ``generation_config.json``, of which null is none, else
    of ``config.json``. ``defaults`` is what these files say about a request.

    Args:
        folder: A folder of transformers.
        vocab_size: Size of the model's vocabulary; larger stop tokens are left out.
        trust_remote_code: Whether Python code in the folder runs.

    Attributes:
        stop_ids: Tokens that end a text.

    Raises:
        CheckpointError: The folder has no tokenizer, or a file is damaged.
    """

    def __init__(
        self, folder: str | Path, vocab_size: int, *, trust_remote_code: bool = False
    ) -> None:
        self._folder = folder
        self._tokenizer = load_tokenizer(folder, trust_remote_code=trust_remote_code)
        self.defaults = folder_defaults(folder, vocab_size, trust_remote_code=trust_remote_code)
        self.stop_ids: frozenset[int] = self.defaults.parameters["stop_token_ids"]

    def sampling_params(self, **changes: Any) -> SamplingParams:
        """Return the sampling parameters of the model's texts, its stop tokens among them.

        Args:
            **changes: Arguments of ``SamplingParams`` that replace them.

        Raises:
            ConfigError: A value is out of range.
        """
        return self.defaults.sampling_params(**changes)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, with the special tokens that start one.

        Raises:
            InputError: The text cannot be encoded.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InputError(
                f"the text is not valid UTF-8 at position {error.start}, and this tokenizer has no "
                "tokens for single bytes. Pass UTF-8.",
                field="text",
            ) from error
        ids: list[int] = self._tokenizer(text).input_ids
        return ids

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the token ids of a chat, up to the start of the reply.

        Args:
            messages: Each with a ``role`` and a ``content``, and what else the template reads.

        Raises:
            CheckpointError: There is no chat template, or it cannot be rendered.
        """
        try:
            ids: Any = self._tokenizer.apply_chat_template(
                [*map(dict, messages)], add_generation_prompt=True, return_dict=False
            )
        except Exception as error:  # a template may raise anything
            raise CheckpointError(
                f"{self._folder} cannot make a chat of the messages: {one_line(error)}. Pass the "
                "prompt as plain text."
            ) from error
        return list(ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens."""
        text = self._tokenizer.decode(
            list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str), "one sequence was passed"
        return text


VOCAB_SIZE = 256
END_OF_TEXT = 0
"""Separator between the files of the training corpus."""


class ByteTokenizer:
    """Tokenizer whose token ids are the values of bytes, with the methods of ``FolderTokenizer``.

    Text may contain lone surrogates from ``surrogateescape``, one per byte that is not UTF-8.
    """

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


Tokenizer = FolderTokenizer | ByteTokenizer
"""What commands take."""
