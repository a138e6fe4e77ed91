"""An engine on a thread of its own, for callers on other threads and in asyncio."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from typing import Self, TypeVar

import torch

from graphkit.config import is_int, require_type
from graphkit.engine.engine import SpeculativeEngine
from graphkit.engine.request import FinishReason, Request
from graphkit.engine.request_stream import RequestStream, TextStream, TokenDecoder
from graphkit.engine.step import SamplingParams
from graphkit.engine.token_matcher import TokenMatcher
from graphkit.errors import (
    ConfigError,
    InputError,
    QueueFullError,
    RankError,
    ReplayError,
    short_repr,
)

logger = logging.getLogger(__name__)
ResultT = TypeVar("ResultT")


class EngineThread:
    """Runs an engine on a thread of its own, for callers on other threads and in asyncio.

    All methods may be called from any thread. Requests join between two steps. The engine belongs
    to the thread until ``close``; use ``call`` to reach it. The thread does not close the engine::

        with model.engine(...) as engine:
            engine.capture()
            with gk.EngineThread(engine, tokenizer) as thread:
                async with thread.submit(tokenizer.encode("import os")) as stream:
                    async for output in stream:
                        print(output.text, end="")

    An exception of a request, such as one of its matcher or of the tokenizer, ends that request
    alone: its stream raises it. If a step raises another exception, the next step continues all
    requests; if that one raises, too, or a rank has failed, all streams and later calls raise
    ``ReplayError``.

    With several ranks, rank 0 has the thread and the others run ``worker_loop``.

    Args:
        engine: The engine.
        tokenizer: Decodes tokens into the text of streams; ``None`` for tokens alone.
        max_waiting: Most requests that wait for room; ``None`` for no limit.

    Raises:
        ConfigError: An argument has a wrong type, or ``max_waiting`` is below 1.
    """

    def __init__(
        self,
        engine: SpeculativeEngine,
        tokenizer: TokenDecoder | None = None,
        *,
        max_waiting: int | None = None,
    ) -> None:
        require_type("EngineThread", "engine", engine, SpeculativeEngine, "a SpeculativeEngine")
        if tokenizer is not None:
            decoder = "an object with decode, or None"
            require_type("EngineThread", "tokenizer", tokenizer, TokenDecoder, decoder)
        if max_waiting is not None and (not is_int(max_waiting) or max_waiting < 1):
            raise ConfigError(
                f"EngineThread.max_waiting must be an int above 0 or None, got {max_waiting}.",
                field="max_waiting",
            )
        self._engine, self._tokenizer, self._max_waiting = engine, tokenizer, max_waiting
        self._changed = threading.Condition()
        """Guards all attributes below."""
        self._calls: deque[Callable[[], object]] = deque()
        self._streams: dict[Request, RequestStream] = {}
        self._num_joining = 0
        """Requests that the engine does not have yet."""
        self._next_deadline = math.inf
        self._is_draining = self._is_closing = False
        self._error: BaseException | None = None
        self._has_failed = self._has_unread = False
        """Whether the last step raised an exception; whether requests ended in such a step."""
        self._thread = threading.Thread(target=self._run, name="graphkit engine", daemon=True)
        self._thread.start()

    def submit(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        stop: Collection[str] = (),
        matcher: TokenMatcher | None = None,
        timeout_s: float | None = None,
    ) -> RequestStream:
        """Queue a prompt and return the stream of its output. Does not wait.

        Args:
            prompt_ids: As for ``SpeculativeEngine.submit``.
            sampling: As for ``SpeculativeEngine.submit``.
            stop: Strings that end the text, which does not include them. The request ends with
                ``FinishReason.STOP_STRING``. They need a tokenizer.
            matcher: As for ``SpeculativeEngine.submit``.
            timeout_s: Seconds from now after which the request ends with ``FinishReason.DEADLINE``,
                whether it waits or runs; ``None`` for no limit.

        Raises:
            QueueFullError: ``max_waiting`` requests wait.
            InputError: As for ``SpeculativeEngine.submit``; or there are stop strings and no
                tokenizer; or ``timeout_s`` is not a positive number.
            ConfigError: ``stop`` is not a collection of strings, or has an empty one.
            ReplayError: The thread drains, is closed or has failed, or the engine is closed.
        """
        deadline = _deadline(timeout_s)
        if stop and self._tokenizer is None:
            raise InputError(
                "submit got stop strings, but the EngineThread has no tokenizer. Pass one.",
                field="stop",
            )
        with self._changed:
            self._check_open()
            queue = self._engine._batching.queue
            waiting = queue.num_waiting + self._num_joining
            if self._max_waiting is not None and waiting >= self._max_waiting:
                raise QueueFullError(
                    f"{waiting} requests wait, and max_waiting is {self._max_waiting}. Submit "
                    "again later."
                )
            request = self._engine._create(prompt_ids, sampling, matcher)
            decoder = None
            if self._tokenizer is not None:
                decoder = TextStream(self._tokenizer, request.prompt_ids, stop)
            stream = RequestStream(request, decoder, deadline, self._abort_from_any_thread)
            queue.claim_matcher(request)
            self._streams[request] = stream
            self._next_deadline = min(self._next_deadline, deadline)
            self._num_joining += 1
            self._enqueue(lambda: self._join_engine(request))
        return stream

    def call(self, function: Callable[[SpeculativeEngine], ResultT]) -> ResultT:
        """Call a function with the engine between two steps; wait for its result and return it.

        The function runs on the thread of the engine, so that it must not wait for streams.

        Raises:
            ReplayError: The thread is closed or has failed.
            Exception: What ``function`` raises.
        """
        if threading.current_thread() is self._thread:  # within another call
            return function(self._engine)
        future: Future[ResultT] = Future()

        def answer() -> None:
            try:
                future.set_result(function(self._engine))
            except BaseException as error:  # a SystemExit, too: the caller waits
                future.set_exception(error)

        with self._changed:
            self._check_open(drains=True)
            self._enqueue(answer)
        return future.result()

    def drain(self, timeout_s: float | None = None) -> bool:
        """Take no more requests and wait until all have ended; return whether they have.

        Args:
            timeout_s: Most seconds to wait; ``None`` for no limit.

        Raises:
            InputError: ``timeout_s`` is not a number of at least 0.
            ReplayError: A function of ``call`` makes this call, for which the thread would wait.
        """
        self._check_other_thread("drain")
        seconds = _seconds(timeout_s, "a number of seconds of at least 0 or None", least=0)
        with self._changed:
            self._is_draining = True
            return self._changed.wait_for(lambda: not self._streams, seconds)

    def close(self) -> None:
        """Abort all requests and end the thread. May be called repeatedly.

        Raises:
            ReplayError: A function of ``call`` makes this call, for which the thread would wait.
        """
        self._check_other_thread("close")
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_other_thread(self, method: str) -> None:
        if threading.current_thread() is self._thread:
            raise ReplayError(
                f"a function of call called {method}, which waits for the thread that runs the "
                f"function. Call {method} on another thread."
            )

    def _check_open(self, *, drains: bool = False) -> None:
        if self._error is not None:
            raise ReplayError(
                f"the thread of the engine has failed: {self._error!r}. Create a new engine."
            ) from self._error
        if self._is_closing or (self._is_draining and not drains):
            state = "is closed" if self._is_closing else "drains"
            raise ReplayError(f"the EngineThread {state}: it takes no requests. Create a new one.")

    def _enqueue(self, call: Callable[[], object]) -> None:
        self._calls.append(call)
        self._changed.notify_all()

    def _abort_from_any_thread(self, request: Request) -> None:
        with self._changed:
            if request in self._streams:
                self._enqueue(lambda: self._end(request, FinishReason.ABORTED))

    # What follows runs on the thread of the engine, which calls methods of the engine that are
    # private to this package.

    def _run(self) -> None:
        device = self._engine.device
        try:
            # A new thread begins on the first device.
            with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
                while self._is_due():
                    self._advance()
                for request in [*self._streams]:
                    self._end(request, FinishReason.ABORTED)
                while self._engine.has_work:  # frees the memory of running requests
                    self._advance()
        except BaseException as error:  # a SystemExit of a matcher, too: readers wait
            self._fail(error)

    def _is_due(self) -> bool:
        """Make the calls of other threads and wait for work; return whether to run a step."""
        while True:
            with self._changed:
                self._changed.wait_for(self._has_something_to_do)
                call = self._calls.popleft() if self._calls else None
            if call is not None:
                call()
            elif self._is_closing:
                return False
            else:
                self._end_late_requests()
                if self._engine.has_work or self._has_unread:
                    return True

    def _has_something_to_do(self) -> bool:
        has_step = self._has_unread or self._engine.has_work
        return bool(self._calls) or self._is_closing or has_step

    def _advance(self) -> None:
        """Run a step and deliver its output."""
        try:
            new_tokens, ended = self._engine._advance()
        except RankError:
            raise
        except Exception as error:
            self._has_unread = True  # the next step returns the requests that have ended
            if not any(request.error is error for request in self._streams):
                if self._has_failed:
                    raise
                self._has_failed = True
                logger.warning("A step raised %r; the next one continues the requests.", error)
            return
        self._has_failed = self._has_unread = False
        for request, tokens in new_tokens:
            stream = self._streams.get(request)
            try:
                if stream is not None and stream.deliver(tokens):
                    self._end(request, FinishReason.STOP_STRING)
            except Exception as error:  # of the tokenizer
                self._end(request, FinishReason.ABORTED, error)
        for request in ended:
            self._finish(request)

    def _end(self, request: Request, reason: FinishReason, error: Exception | None = None) -> None:
        """End a request that has not ended."""
        if request in self._streams:
            self._engine.abort(request, reason)
            self._finish(request, error)

    def _finish(self, request: Request, error: Exception | None = None) -> None:
        """End the stream of a request."""
        with self._changed:
            stream = self._streams.pop(request, None)
            self._changed.notify_all()
        if stream is not None:
            stream.end(error or request.error)

    def _join_engine(self, request: Request) -> None:
        with self._changed:
            self._num_joining -= 1
        self._engine._put([request])

    def _end_late_requests(self) -> None:
        now = time.monotonic()
        if now < self._next_deadline:
            return
        with self._changed:
            if self._calls:  # a request that the engine does not have yet cannot end in it
                return
            streams = [*self._streams.values()]
        for stream in streams:
            if stream.deadline <= now:
                self._end(stream.request, FinishReason.DEADLINE)
        with self._changed:
            deadlines = (stream.deadline for stream in self._streams.values())
            self._next_deadline = min(deadlines, default=math.inf)

    def _fail(self, error: BaseException) -> None:
        """End all streams and calls after an error of the engine."""
        logger.error("The thread of the engine has failed.", exc_info=error)
        with self._changed:
            self._error = error
            streams, self._streams = self._streams, {}
            self._changed.notify_all()
        while self._calls:  # none follows; those that wait for a result get one
            self._calls.popleft()()
        for stream in streams.values():
            failure = ReplayError(f"the thread of the engine has failed: {error!r}.")
            failure.__cause__ = error
            stream.end(failure)


def _deadline(timeout_s: object) -> float:
    """Return the ``time.monotonic()`` of a deadline."""
    seconds = _seconds(timeout_s, "a positive number of seconds or None", least=math.ulp(0.0))
    return math.inf if seconds is None else time.monotonic() + seconds


def _seconds(timeout_s: object, expected: str, *, least: float) -> float | None:
    """Return the seconds of a limit, at most those that a thread can wait for."""
    if timeout_s is None:
        return None
    if not isinstance(timeout_s, int | float) or not timeout_s >= least:  # also refuses NaN
        raise InputError(
            f"timeout_s must be {expected}, got {short_repr(timeout_s)}.", field="timeout_s"
        )
    return min(timeout_s, threading.TIMEOUT_MAX)
