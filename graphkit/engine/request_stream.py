"""The output of a request of an ``EngineThread`` as it arrives."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Self

from graphkit.engine.request import Request


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
    The iteration ends with the request. Leaving a ``with`` or ``async with`` block aborts the
    request if it has not ended, and so does dropping the stream.

    Attributes:
        request: The request, with ``finish_reason`` and times. The engine may be some tokens ahead
            of what the stream has returned.
        text: Text that the iteration has returned.
        token_ids: Tokens that the iteration has returned.
    """

    def __init__(self, request: Request, abort: Callable[[Request], None]) -> None:
        self.request, self._abort = request, abort
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

    def deliver(self, output: RequestOutput) -> None:
        """Add output. For the thread of the engine."""
        with self._changed:
            self._new.text += output.text
            self._new.token_ids += output.token_ids
            self._new.logprobs += output.logprobs
            if output.text or output.token_ids:
                self._wake()

    def end(self, error: Exception | None) -> None:
        """End the iteration, with an error or without. For the thread of the engine."""
        with self._changed:
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
