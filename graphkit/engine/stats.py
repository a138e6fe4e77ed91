"""Counters of an engine."""

from __future__ import annotations

import copy
import math
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

from graphkit.engine.queue import RequestQueue
from graphkit.engine.request import FinishReason, NewTokens, Request, VerifySteps
from graphkit.engine.request_memory import RequestMemory
from graphkit.runners import Runner

TIME_BOUNDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0,
    math.inf,
)  # fmt: skip
"""Upper bounds of the buckets of a ``TimeHistogram``, in seconds."""


@dataclass(slots=True)
class TimeHistogram:
    """Times by bucket.

    Attributes:
        counts: Number of times by the upper bound of their bucket, one of ``TIME_BOUNDS``.
        seconds: Sum of the times.
    """

    counts: Counter[float] = field(default_factory=Counter)
    seconds: float = 0.0

    @property
    def mean(self) -> float:
        """Mean time in seconds; 0 without times."""
        return self.seconds / self.counts.total() if self.counts else 0.0

    def add(self, seconds: float) -> None:
        """Count a time."""
        self.counts[TIME_BOUNDS[bisect_left(TIME_BOUNDS, seconds)]] += 1
        self.seconds += seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats(VerifySteps):
    """Counts over all requests since the engine was created.

    Times end when ``step`` returns, because its caller has the tokens then.

    Attributes:
        new_tokens: Tokens generated.
        prompt_tokens: Tokens of the prompts of requests that have a first token.
        finished: Requests that have ended, by reason.
        time_to_first_token: Times from the submission of a request to its first token.
        inter_token_latency: Times between two calls of ``step`` that returned tokens of a request.
            A verify step returns its accepted tokens together.
        latency: Times from the submission of a request to its end.
        queue_time: Times from the submission of a request to its first admission.
        accepted_lengths: Verify steps by the number of tokens that they accepted, the bonus token
            included, shortest first. A step counts once per request that took part. Counts tokens
            behind the end of a request too.
        drafted_lengths: The same steps by the number of drafts that they verified for the request,
            fewest first.
        replays: Graph replays by forward mode; blocks of a DFLASH draft model are those of
            ``draft TARGET_VERIFY``.
        fallbacks: Eager runs by forward mode, named as in ``replays``, and reason.
        running, waiting: Requests that are admitted, and that wait for room.
        preemptions: Times that a request had to give its KV slots to earlier ones.
        kv_usage: KV slots that requests hold, as a part of all, 0 to 1.
        step_seconds: Time of the steps, 0 with one draft length and without a length 0. Each counts
            as long as it took on CUDA, else as long as at the capture. On the recorder, counted
            work of graphs instead of microseconds.
        plain_seconds: Time of plain decoding for the tokens of the same steps: the tokens of each
            step per request times the measured time of a plain step of its batch size.
    """

    new_tokens: int
    prompt_tokens: int
    finished: Mapping[FinishReason, int]
    time_to_first_token: TimeHistogram
    inter_token_latency: TimeHistogram
    latency: TimeHistogram
    queue_time: TimeHistogram
    accepted_lengths: Mapping[int, int]
    drafted_lengths: Mapping[int, int]
    replays: Mapping[str, int]
    fallbacks: Mapping[str, Mapping[str, int]]
    running: int
    waiting: int
    preemptions: int
    kv_usage: float

    step_seconds: float = 0.0
    plain_seconds: float = 0.0

    @property
    def gain_over_plain(self) -> float:
        """Speed of the steps over plain decoding since the start; 0 if it is not measured."""
        return self.plain_seconds / self.step_seconds if self.step_seconds else 0.0


@dataclass
class _Counts:
    """Counters of requests, named as in ``EngineStats``."""

    new_tokens: int = 0
    prompt_tokens: int = 0
    finished: Counter[FinishReason] = field(default_factory=Counter)
    time_to_first_token: TimeHistogram = field(default_factory=TimeHistogram)
    inter_token_latency: TimeHistogram = field(default_factory=TimeHistogram)
    latency: TimeHistogram = field(default_factory=TimeHistogram)
    queue_time: TimeHistogram = field(default_factory=TimeHistogram)
    accepted_lengths: Counter[int] = field(default_factory=Counter)
    drafted_lengths: Counter[int] = field(default_factory=Counter)

    def add(self, request: Request) -> None:
        self.new_tokens += len(request.output_ids)
        self.accepted_lengths.update(request.accepted_lengths)
        self.drafted_lengths.update(request.drafted_lengths)


class Tally:
    """Counts the requests that have ended, and keeps their tokens and errors for the next step."""

    def __init__(self) -> None:
        self._counts = _Counts()
        self._ended: dict[Request, None] = {}
        """Requests whose last tokens no step has returned, in the order in which they ended."""
        self._counted: WeakSet[Request] = WeakSet()
        """Requests that have ended, as long as a caller has them."""
        self._errors: list[Exception] = []
        """Errors of requests that no step has raised."""

    def end(self, requests: Iterable[Request]) -> None:
        """Count finished requests, each once even if an interrupted call is repeated."""
        for request in requests:
            if request in self._counted:
                continue
            self._ended[request] = None
            self._counted.add(request)
            if request.finish_reason is not None:
                self._counts.finished[request.finish_reason] += 1
            self.add(request)
            if request.error is not None:
                self._errors.append(request.error)

    def __contains__(self, request: Request) -> bool:
        """Return whether a request has ended and is counted here."""
        return request in self._counted

    def change_reason(self, request: Request, reason: FinishReason) -> None:
        """Give a request that has ended another reason, and count it under that one."""
        assert request.finish_reason is not None, "it has ended"
        if request in self._counted:  # else an interrupted step has not counted it yet
            self._counts.finished[request.finish_reason] -= 1
            self._counts.finished[reason] += 1
        request.finish_reason = reason

    def raise_error(self) -> None:
        """Raise the first error of the requests that have failed, and forget the others."""
        if self._errors:
            errors, self._errors = self._errors, []
            raise errors[0]

    def take_new_tokens(self, started: Iterable[Request]) -> tuple[NewTokens, list[Request]]:
        """Return tokens that no call has returned, and the requests that ended since the last call.

        Args:
            started: Requests that have not ended and may have tokens.
        """
        ended, now = list(self._ended), time.monotonic()
        new_tokens = [
            (request, request.output_ids[request.num_returned :])
            for request in (*ended, *started)
            if len(request.output_ids) > request.num_returned
        ]
        for request, tokens in new_tokens:
            request.num_returned += len(tokens)
            self._count_times(request, now)
        for request in ended:
            request.finished_at = now
            self._counts.latency.add(now - request.submitted_at)
        self._ended.clear()
        return new_tokens, ended

    def _count_times(self, request: Request, now: float) -> None:
        """Count the times of a request that has new tokens."""
        if request.last_token_at is not None:
            self._counts.inter_token_latency.add(now - request.last_token_at)
        else:
            request.first_token_at = now
            assert request.admitted_at is not None, "it has tokens"
            self._counts.prompt_tokens += len(request.prompt_ids)
            self._counts.queue_time.add(request.admitted_at - request.submitted_at)
            self._counts.time_to_first_token.add(now - request.submitted_at)
        request.last_token_at = now

    def add(self, request: Request) -> None:
        """Add the counters of a request."""
        self._counts.add(request)

    def stats(
        self,
        queue: RequestQueue,
        memory: RequestMemory,
        runners: Iterable[Runner[Any, Any]],
        seconds: tuple[float, float],
    ) -> EngineStats:
        """Return the counts, unfinished requests included."""
        total = copy.deepcopy(self._counts)
        for request in queue.started:
            total.add(request)
        lengths = {
            name: dict(sorted(getattr(total, name).items()))
            for name in ("accepted_lengths", "drafted_lengths")
        }
        replays: Counter[str] = Counter()
        fallbacks: dict[str, Counter[str]] = {}
        for runner in runners:  # of several draft lengths, each has runners of the same modes
            stats = runner.stats
            replays[runner.label] += stats.replays
            if stats.fallbacks:
                fallbacks.setdefault(runner.label, Counter()).update(stats.fallbacks)
        return EngineStats(
            **(vars(total) | lengths),
            replays=replays,
            fallbacks=fallbacks,
            running=len(list(queue.admitted)),
            waiting=queue.num_waiting,
            preemptions=queue.num_preemptions,
            kv_usage=memory.held_slots / memory.total_slots,
            plain_seconds=seconds[0],
            step_seconds=seconds[1],
        )
