"""The tokenizer of a checkpoint folder: ``tokenizer.json``, stop tokens and chat template."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphkit.config import is_int
from graphkit.errors import CheckpointError, InputError
from graphkit.reference.chat_template import render_chat
from graphkit.reference.checkpoint_folder import read_config, read_json_if_present
from graphkit.reference.tokenizer import VOCAB_SIZE, ByteTokenizer, Tokenizer

if TYPE_CHECKING:
    import tokenizers

_FILE = "tokenizer.json"


def load_tokenizer(folder: Path, vocab_size: int) -> Tokenizer:
    """Return the tokenizer of a checkpoint folder.

    Args:
        folder: A folder with ``tokenizer.json``, or of a model whose tokens are bytes.
        vocab_size: Size of the model's vocabulary (V); 256 without ``tokenizer.json`` means bytes.

    Raises:
        CheckpointError: The folder has no tokenizer, the tokenizer cannot be loaded, or it has
            tokens that the model lacks.
    """
    if (folder / _FILE).exists():
        return FolderTokenizer(folder, vocab_size)
    if vocab_size == VOCAB_SIZE:
        return ByteTokenizer()
    raise CheckpointError(
        f"{str(folder)!r} contains no {_FILE}, and its vocabulary of {vocab_size} tokens is not "
        f"that of bytes. Add the {_FILE} of the model."
    )


class FolderTokenizer:
    """The tokenizer of ``tokenizer.json``, with the interface ``Tokenizer``.

    Its post-processor decides which special tokens start a text. The stop tokens are
    ``eos_token_id`` of ``generation_config.json``, else of ``config.json``, without ids that the
    model lacks.

    Args:
        folder: Contains ``tokenizer.json`` and ``config.json``.
        vocab_size: Size of the model's vocabulary (V).

    Raises:
        CheckpointError: The package ``tokenizers`` is missing, a file is damaged, or the tokenizer
            has tokens that the model lacks.
    """

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self._folder = folder
        self.stop_ids = frozenset(each for each in _stop_ids(folder) if each < vocab_size)
        self._tokenizer = _read(folder / _FILE)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        last = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
        if last >= vocab_size:
            raise CheckpointError(
                f"{str(folder / _FILE)!r} has token ids up to {last}, but the model has a "
                f"vocabulary of {vocab_size}. Use the {_FILE} of the model."
            )

    def encode(self, text: str) -> list[int]:
        """See ``Tokenizer.encode``."""
        return self._encode(text, add_special_tokens=True)

    def encode_chat(self, message: str) -> list[int]:
        """See ``Tokenizer.encode_chat``. The template itself writes the special tokens."""
        return self._encode(render_chat(self._folder, message), add_special_tokens=False)

    def decode(self, ids: Sequence[int]) -> str:
        """See ``Tokenizer.decode``. Ids without a token are left out."""
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InputError(
                f"the text is not valid UTF-8 at position {error.start}, and this tokenizer has no "
                "tokens for single bytes. Pass UTF-8.",
                field="text",
            ) from error
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)


def _read(file: Path) -> tokenizers.Tokenizer:
    try:
        import tokenizers
    except ImportError as error:
        raise CheckpointError(
            f"reading {str(file)!r} needs the package tokenizers, which is not installed. Install "
            "graphkit-cuda[models]."
        ) from error
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the package raises nothing more specific
        reason = str(error).partition("\n")[0]
        raise CheckpointError(
            f"{str(file)!r} is not a tokenizer that tokenizers {tokenizers.__version__} can load: "
            f"{reason}. Download it again, or upgrade tokenizers."
        ) from error


def _stop_ids(folder: Path) -> frozenset[int]:
    ids = read_json_if_present(folder, "generation_config.json").get("eos_token_id")
    if ids is None:
        ids = read_config(folder).get("eos_token_id")
    listed: list[Any] = ids if isinstance(ids, list) else [] if ids is None else [ids]
    if not all(is_int(each) and each >= 0 for each in listed):
        raise CheckpointError(
            f"{str(folder)!r}: eos_token_id must be a token id or a list of them, got {ids!r}. "
            "Correct generation_config.json or config.json."
        )
    return frozenset(listed)
