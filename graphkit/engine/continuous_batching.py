"""Requests of an engine: they are submitted, join a batch between its steps, and leave it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Self

import torch

from graphkit.distributed import RankGroup
from graphkit.engine.call_broadcast import CallBroadcast, LocalCalls
from graphkit.engine.kv.pool_use import PoolUse
from graphkit.engine.queue import RequestQueue
from graphkit.engine.request import FinishReason, NewTokens, Request
from graphkit.engine.request_memory import RequestMemory, SlotReservation
from graphkit.engine.schedule import RunningBatch, Schedule
from graphkit.engine.stats import EngineStats, Tally
from graphkit.engine.step import SamplingParams
from graphkit.engine.token_matcher import TokenMatcher
from graphkit.errors import InputError, ReplayError, short_repr

_REASONS_OF_CALLERS = FinishReason.ABORTED, FinishReason.DEADLINE, FinishReason.STOP_STRING


class _ContinuousBatching:
    """Takes requests, and runs steps for all that have room. Base of ``SpeculativeEngine``.

    Args:
        queue: Requests that wait and that are admitted.
        schedule: Runs the steps.
        slots: Reserves the KV slots of the steps.
        memory: Rows and KV slots.
        use: Use of the pools that the memory belongs to.
        device: Device of the steps.
        group: Ranks that run the same requests together, or ``None``.
        calls: Shares calls with these ranks.
        structured_output: Whether requests may have a matcher.
    """

    def __init__(
        self,
        queue: RequestQueue,
        schedule: Schedule,
        slots: SlotReservation,
        memory: RequestMemory,
        use: PoolUse,
        *,
        device: torch.device,
        group: RankGroup | None,
        calls: LocalCalls,
        structured_output: bool,
    ) -> None:
        self._queue, self._schedule, self._slots, self.memory = queue, schedule, slots, memory
        self.device, self.group, self.structured_output = device, group, structured_output
        self._calls, self.runners = calls, schedule.runners
        self._batch: RunningBatch | None = None
        self._tally = Tally()
        self._is_interrupted = self._closed = self._is_released = False
        self._use = use
        # Not at exit: the modules and the CUDA context that it needs may be gone by then.
        weakref.finalize(self, _free, schedule, memory).atexit = False
        memory.open()

    def submit(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        matcher: TokenMatcher | None = None,
    ) -> Request:
        """Queue a prompt. A later ``step`` admits it as soon as there is room.

        Args:
            prompt_ids: Token ids to continue.
            sampling: ``None`` selects the defaults of ``SamplingParams``.
            matcher: Constrains the output to a grammar, from its first token on. Needs
                ``structured_output``. The request ends when the matcher terminates. ``top_k``,
                ``top_p`` and ``min_p`` apply to the tokens that it allows.

        Returns:
            The request, whose ``output_ids`` grow with each ``step``.

        Raises:
            InputError: The prompt is empty without a ``bos_token_id``, contains something other
                than token ids, or is too long for the context or the KV pool. ``sampling`` is not a
                ``SamplingParams``, or has a stop token outside the vocabulary. The engine has no
                structured output, or the matcher is not a ``TokenMatcher``, has terminated, or is
                for another vocabulary.
            ReplayError: The engine is closed.
        """
        request = self._create(prompt_ids, sampling, matcher)
        self._put([request])
        return request

    def _create(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams | None,
        matcher: TokenMatcher | None,
    ) -> Request:
        """Check the arguments of ``submit``, and return a request that does not wait yet."""
        self._check_open()
        if matcher is not None and not self.structured_output:
            raise InputError(
                "submit got a matcher, but the engine was created without structured output. Pass "
                "structured_output=True to SpeculativeEngine.",
                field="matcher",
            )
        if matcher is not None and self.group is not None:
            raise InputError(
                "submit got a matcher, which an engine with several ranks cannot pass on. Use an "
                "engine without group.",
                field="matcher",
            )
        return self._queue.create(prompt_ids, sampling, matcher)

    def abort(self, request: Request, reason: FinishReason = FinishReason.ABORTED) -> None:
        """End a request. It keeps its tokens and gets no more.

        A waiting request leaves the queue. The row and the KV slots of a running one are freed by
        the next ``step``, before waiting requests join; device loops of v3 end after the steps
        that they run. Does nothing for a request that has finished. Does not wait.

        Args:
            request: As returned by ``submit``.
            reason: Its ``finish_reason``: ``ABORTED``, ``DEADLINE`` or ``STOP_STRING``.

        Raises:
            InputError: ``request`` is not a ``Request``, or belongs to another engine, or
                ``reason`` is none of these.
            ReplayError: The engine is closed.
        """
        self._check_open()
        if not isinstance(request, Request):
            raise InputError(
                f"abort got {short_repr(request)}, expected a Request that submit returned.",
                field="request",
            )
        if reason not in _REASONS_OF_CALLERS:
            names = ", ".join(allowed.name for allowed in _REASONS_OF_CALLERS)
            raise InputError(
                f"abort got the reason {short_repr(reason)}, expected a FinishReason of {names}.",
                field="reason",
            )
        if request.is_finished:
            return
        if request not in self._queue:
            raise InputError(
                "abort got a request that neither waits nor runs in this engine. Pass a Request "
                "that submit of this engine returned.",
                field="request",
            )
        request.finish_reason = reason  # first: an interrupted call ends it, too
        if self._queue.drop(request):
            self._tally.end([request])
        else:
            self._schedule.interrupt()
        self._calls.aborted(request)

    @property
    def has_work(self) -> bool:
        """Whether a request is waiting or running."""
        return bool(self._queue)

    @property
    def stats(self) -> EngineStats:
        """Counts over all requests so far, as a snapshot."""
        return self._tally.stats(self._queue, self.memory, self.runners)

    def step(self) -> NewTokens:
        """Admit waiting requests, prefill, run one step for all running ones, remove finished ones.

        At most one forward prefills prompts, with up to ``chunked_prefill_size`` tokens of all
        admitted requests together, so that running requests wait for one chunk at most. If the KV
        pool runs out, the requests that were admitted last are preempted: they wait again, before
        all others, and their text does not change.

        v1 drafts and verifies, waits for the accepted tokens, then catches up on them. It returns
        the tokens of this step.

        v2 enqueues the whole step, then waits for the tokens of the previous step and returns them.
        The call that finishes the last request returns all remaining tokens.

        v3 launches a loop if none runs, and the next one if no request waits. It returns the tokens
        of all completed steps, at least one. A waiting request ends the loops as soon as it has
        room, and joins when they have ended. While prompts are prefilled, a call runs one step.

        A batch with a matcher waits for its drafts, and for all earlier tokens, before it verifies.

        A request whose prefill or matcher raises an exception ends with ``FinishReason.FAILED``.
        The step completes for all other requests, then raises the exception.

        Returns:
            The new tokens of each request that has some. After a step that raised, the next call
            also returns the tokens that it had delivered.
        """
        return self._advance()[0]

    @torch.no_grad()
    def _advance(self) -> tuple[NewTokens, list[Request]]:
        """Do what ``step`` does; return the requests that ended since the last call, too."""
        return self._calls.guard(self._step)

    def _step(self) -> tuple[NewTokens, list[Request]]:
        self._check_open()
        self._calls.step()
        if self._is_interrupted:
            self._restart()
        self._is_interrupted = True
        self._remove_finished()  # requests that were aborted
        if self._queue.prefilling or self._queue.can_admit:
            self._schedule.interrupt()
            if self._schedule.can_admit:
                self._queue.admit()
                if self._queue.prefilling:
                    self._queue.prefill(self._schedule.begin)
                self._remove_finished()  # requests that failed
        if self._schedule.can_admit:
            self._make_room()
        if self._queue.running:
            self._schedule.advance(
                self._running_batch(),
                is_anyone_waiting=self._queue.num_waiting > 0,
                is_prefilling=bool(self._queue.prefilling),
            )
            self._remove_finished()
        if not self._queue.running:
            self._schedule.drain()
        self._is_interrupted = False
        self._tally.raise_error()
        new_tokens, ended = self._tally.take_new_tokens(self._queue.started)
        self._calls.check(new_tokens, ended)
        return new_tokens, ended

    def worker_loop(self) -> None:
        """Repeat the calls of rank 0 until it closes its engine. For the other ranks of ``group``.

        Raises:
            RankError: A rank has ended, or generated other tokens than rank 0.
            ReplayError: The engine has no group, is closed, or this is rank 0.
        """
        self._check_open()
        calls = self._calls
        if self.group is None or not self.group.rank or not isinstance(calls, CallBroadcast):
            raise ReplayError(
                "worker_loop() is for ranks other than 0 of an engine with group=. "
                "Call submit and step."
            )
        calls.worker_loop(self.submit, self.abort, self.step)

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams | None = None
    ) -> list[Request]:
        """Continue all prompts until they finish; return the requests in the same order.

        If a step raises an exception, all requests of this call are aborted.

        Raises:
            InputError: As for ``submit``, or ``prompts`` cannot be iterated. No prompt is queued.
            ReplayError: The engine is closed.
        """
        self._check_open()
        if not isinstance(prompts, Iterable):
            raise InputError(
                f"generate got {short_repr(prompts)}, expected a sequence of prompts.",
                field="prompts",
            )
        requests = [self._queue.create(prompt, sampling) for prompt in prompts]
        self._put(requests)
        try:
            while self.has_work:
                self.step()
        except BaseException:
            for request in requests:  # the caller cannot: they were not returned
                self.abort(request)
            raise
        return requests

    def close(self) -> None:
        """Close all runners and free what unfinished requests hold. May be called repeatedly.

        Unfinished requests keep the tokens generated so far, with ``finish_reason`` ``None``.

        Raises:
            RankError: A rank of ``group`` fails meanwhile, or generated other tokens. Everything is
                closed and freed nevertheless. After a failure of a rank, ``close`` does not wait.
        """
        if self._is_released:
            return
        self._closed = True
        with ExitStack() as last_first:  # closes and frees everything, also if a rank has failed
            last_first.callback(self._queue.close)
            for runner in reversed(self.runners):
                last_first.callback(runner.close)
            last_first.callback(self._release)
            self._calls.close()
            if not self._is_interrupted:
                self._is_interrupted = True
                self._calls.finish(self._schedule.drain)
        self._is_released = True

    def _release(self) -> None:
        """Free what unfinished requests hold, and give up the pools."""
        if self.group is None:
            self._schedule.reset()
        self._requeue()
        for request in self._queue.clear():
            self._tally.add(request)
        self.memory.close()
        self._use.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _type: object, error: BaseException | None, _traceback: object) -> None:
        if error is not None:
            self._calls.leave(error)
        self.close()

    def _put(self, requests: Sequence[Request]) -> None:
        self._queue.put(requests)
        for request in requests:
            self._calls.submitted(request)

    def _check_open(self) -> None:
        if self._closed:
            raise ReplayError(
                "the engine is closed: it takes no requests and no capture. Create a new engine."
            )

    def _make_room(self) -> None:
        """Reserve KV slots for the next step, and preempt requests if the pool has too few."""
        if not self._queue.running or self._schedule.make_room(self._running_batch()):
            return
        self._schedule.drain()  # after that, the host knows what each request needs
        self._remove_finished()
        if self._queue.running:
            self._slots.give_back(self._queue.running)
        while self._queue.running and not self._schedule.make_room(self._running_batch()):
            self._queue.preempt()
            self._batch = None

    def _remove_finished(self) -> None:
        finished = [request for request in self._queue.admitted if request.is_finished]
        self._tally.end(finished)
        self._queue.remove(finished)

    def _restart(self) -> None:
        """Requeue the running requests. An interrupted step leaves their device state unknown."""
        self._schedule.reset()
        self._requeue()
        self._batch = None

    def _requeue(self) -> None:
        """Let the admitted requests wait again, and end those that have finished."""
        self._queue.requeue()
        self._tally.end(self._queue.admitted)
        self._queue.drop_finished()

    def _running_batch(self) -> RunningBatch:
        """Return the running requests, a new batch only when they have changed."""
        running = self._queue.running
        if self._batch is None or self._batch.requests != running:
            self._batch = RunningBatch(running, self.device)
        return self._batch


def _free(schedule: Schedule, memory: RequestMemory) -> None:
    """Free the memory of an engine that was dropped without ``close``."""
    schedule.interrupt()
    memory.close()
