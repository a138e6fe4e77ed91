"""The tokenizer, the chat template and the stop tokens of a folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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

    Args:
        folder: A folder of transformers.
        trust_remote_code: Whether Python code in the folder runs.

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
    """Text as tokens of a folder, with the interface ``byte_tokenizer.Tokenizer``.

    The stop tokens are ``eos_token_id`` of ``generation_config.json``, of which null is none, else
    of ``config.json``. ``defaults`` is what these files say about a request.

    Args:
        folder: A folder of transformers.
        vocab_size: Size of the model's vocabulary; larger stop tokens are left out.
        trust_remote_code: Whether Python code in the folder runs.

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
        """See ``Tokenizer.sampling_params``."""
        return self.defaults.sampling_params(**changes)

    def encode(self, text: str) -> list[int]:
        """See ``Tokenizer.encode``."""
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
        """See ``Tokenizer.encode_chat``."""
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
        """See ``Tokenizer.decode``."""
        text = self._tokenizer.decode(
            list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str), "one sequence was passed"
        return text
