"""Text of the tokens of a request as they arrive."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from graphkit.errors import ConfigError, short_repr

_INCOMPLETE = "\ufffd"


class TokenDecoder(Protocol):
    """Converts token ids to text, such as ``graphkit.models.FolderTokenizer``."""

    def decode(self, ids: Sequence[int], /) -> str:
        """Return the text of token ids, without special tokens.

        Bytes that are not UTF-8 become U+FFFD, also those of a character that is not complete yet.
        """
        ...


class TextStream:
    """Decodes the new tokens of a request into pieces of text.

    A piece never ends within a character: bytes of a character that is not complete wait for the
    others. The prompt and all pieces together are the text of all tokens, so a piece starts with a
    space where the tokenizer drops the space that starts a text.

    The text ends before the stop string that is complete first. Text that may become a stop string
    waits for the characters after it. Pieces do not depend on how tokens are grouped into calls,
    only their borders do.

    Args:
        tokenizer: Decodes the tokens.
        prompt_ids: Tokens before the first new one.
        stop: Stop strings.

    Attributes:
        text: All pieces so far.
        is_stopped: Whether a stop string ended the text.

    Raises:
        ConfigError: ``stop`` is not a collection of strings, or has an empty one.
    """

    def __init__(
        self, tokenizer: TokenDecoder, prompt_ids: Sequence[int] = (), stop: Collection[str] = ()
    ) -> None:
        if isinstance(stop, str) or not all(isinstance(string, str) for string in stop):
            raise ConfigError(
                f"stop must be a collection of strings, got {short_repr(stop)}.", field="stop"
            )
        if "" in stop:
            raise ConfigError(
                "a stop string is empty, which would end every text at once. Pass at least one "
                "character.",
                field="stop",
            )
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        # Decoding starts a few tokens before the first one without text: the text of a token
        # depends on the tokens before it. `_known` is the text of the first `_read` tokens.
        self._window, self._read = list(prompt_ids), len(prompt_ids)
        self._known = tokenizer.decode(self._window)
        self._held = ""
        self.text = ""
        self.is_stopped = False

    def append(self, tokens: Sequence[int]) -> str:
        """Add new tokens and return the next piece; empty after a stop string."""
        if self.is_stopped:
            return ""
        self._window += tokens
        decoded = self._tokenizer.decode(self._window)
        if len(decoded) <= len(self._known) or decoded.endswith(_INCOMPLETE):
            return ""
        new = decoded[len(self._known) :]
        self._window = self._window[self._read :]
        self._read = len(self._window)
        self._known = self._tokenizer.decode(self._window)
        return self._piece(new)

    def finish(self) -> str:
        """Return the last piece, with U+FFFD for bytes whose character is not complete."""
        if self.is_stopped:
            return ""
        piece = self._piece(self._tokenizer.decode(self._window)[len(self._known) :])
        rest, self._held = self._held, ""
        self.text += rest
        return piece + rest

    def _piece(self, new: str) -> str:
        """Return what can be given out of held and new text, and hold the rest."""
        text = self._held + new
        # Held text is shorter than a stop string, so that no match starts before it.
        ends = [(start + len(s), start) for s in self._stop if (start := text.find(s)) >= 0]
        if ends:
            self.is_stopped, self._held = True, ""
            piece = text[: min(ends)[1]]
        else:
            length = len(text) - self._length_to_hold(text)
            piece, self._held = text[:length], text[length:]
        self.text += piece
        return piece

    def _length_to_hold(self, text: str) -> int:
        """Return the length of the longest end of a text that starts a stop string."""
        lengths = (n for s in self._stop for n in range(len(s)) if text.endswith(s[:n]))
        return max(lengths, default=0)
