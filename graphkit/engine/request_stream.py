"""The output of a request of an ``EngineThread`` as it arrives: its tokens, and their text."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol, Self, runtime_checkable

from graphkit.config import require_type
from graphkit.engine.request import Request
from graphkit.errors import ConfigError, short_repr


@dataclass(slots=True)
class RequestOutput:
    """New output of a request.

    Attributes:
        text: New text, in whole characters; empty without a tokenizer. Text that may begin a stop
            string comes later.
        token_ids: New tokens, a stop token included.
        logprobs: Their log-probabilities, if ``SamplingParams.logprobs`` is set.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class RequestStream:
    """Output of a request as it arrives; ``EngineThread.submit`` returns it.

    Iterate over it with ``for`` on a thread or with ``async for`` in asyncio, one reader at a time.
    An item has all output since the item before, so that a slow reader gets fewer and larger ones.
    The iteration ends with the request, and raises the exception that ended it, if any. Leaving a
    ``with`` or ``async with`` block aborts the request if it has not ended.

    Attributes:
        request: The request, with ``finish_reason`` and times. The engine may be some tokens ahead
            of what the stream has returned.
        text: Text that the iteration has returned.
        token_ids: Tokens that the iteration has returned.
        deadline: ``time.monotonic()`` at which the request ends; ``inf`` for none.
    """

    def __init__(
        self,
        request: Request,
        decoder: TextStream | None,
        deadline: float,
        abort: Callable[[Request], None],
    ) -> None:
        self.request, self.deadline = request, deadline
        self._decoder, self._abort = decoder, abort
        self.text, self.token_ids = "", list[int]()
        self._changed = threading.Condition()
        self._new = RequestOutput()
        self._is_ended = False
        self._error: Exception | None = None
        self._waiter: Future[None] | None = None

    def abort(self) -> None:
        """End the request; may be called from any thread, repeatedly. Does not wait."""
        if not self._is_ended:
            self._abort(self.request)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> RequestOutput:
        with self._changed:
            self._changed.wait_for(lambda: self._is_ended or self._new.token_ids or self._new.text)
            output = self._take()
        if output is None:
            raise StopIteration
        return output

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        waiter: Future[None] = Future()
        with self._changed:
            output, must_wait = self._take(), not self._is_ended
            if output is None and must_wait:
                self._waiter = waiter
        if output is None and must_wait:
            await asyncio.wrap_future(waiter)
            with self._changed:
                output = self._take()
        if output is None:
            raise StopAsyncIteration
        return output

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.abort()

    def deliver(self, tokens: Sequence[int]) -> bool:
        """Add tokens; return whether a stop string ends the text. For the thread of the engine."""
        request, decoder = self.request, self._decoder
        with self._changed:
            if decoder is not None:
                stop_ids = request.sampling.stop_token_ids
                self._new.text += decoder.append([t for t in tokens if t not in stop_ids])
            self._new.token_ids += tokens
            first = request.num_returned - len(tokens)
            self._new.logprobs += request.logprobs[first : request.num_returned]
            self._wake()
        return decoder is not None and decoder.is_stopped

    def end(self, error: Exception | None) -> None:
        """End the iteration, with an error or without. For the thread of the engine."""
        with self._changed:
            try:
                if self._decoder is not None:
                    self._new.text += self._decoder.finish()
            except Exception as failure:  # of the tokenizer
                error = error or failure
            self._is_ended, self._error = True, error
            self._wake()

    def _wake(self) -> None:
        self._changed.notify_all()
        waiter, self._waiter = self._waiter, None
        if waiter is not None and waiter.set_running_or_notify_cancel():
            waiter.set_result(None)

    def _take(self) -> RequestOutput | None:
        """Return what is new; ``None`` if nothing is. Raise the error that ended the request."""
        output = self._new
        if output.text or output.token_ids:
            self._new = RequestOutput()
            self.text += output.text
            self.token_ids += output.token_ids
            return output
        if self._error is not None:
            raise self._error
        return None


_INCOMPLETE = "\ufffd"


@runtime_checkable
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
        ConfigError: An argument has a wrong type, or a stop string is empty.
    """

    def __init__(
        self, tokenizer: TokenDecoder, prompt_ids: Sequence[int] = (), stop: Collection[str] = ()
    ) -> None:
        require_type("TextStream", "tokenizer", tokenizer, TokenDecoder, "an object with decode")
        ids_type = "a sequence of token ids"
        require_type("TextStream", "prompt_ids", prompt_ids, Sequence, ids_type)
        require_type("TextStream", "stop", stop, Collection, "a collection of strings")
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
        # depends on the tokens before it. `_known` is the text of the window that is given out or
        # held: of its first `_read` tokens, and of whole characters behind them.
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
        whole = decoded.rstrip(_INCOMPLETE)
        if len(whole) <= len(self._known):
            return ""
        new, self._known = whole[len(self._known) :], whole
        if whole == decoded:
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
