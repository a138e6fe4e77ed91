"""Counters of an engine."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from graphkit.engine.queue import RequestQueue
from graphkit.engine.request import NewTokens, Request
from graphkit.engine.request_memory import RequestMemory
from graphkit.runners import Runner


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Counts over all requests since the engine was created.

    Attributes:
        new_tokens: Tokens generated.
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
    """

    new_tokens: int
    accepted_lengths: Mapping[int, int]
    drafted_lengths: Mapping[int, int]
    replays: Mapping[str, int]
    fallbacks: Mapping[str, Mapping[str, int]]
    running: int
    waiting: int
    preemptions: int
    kv_usage: float

    @property
    def num_verifies(self) -> int:
        """Verify steps, counted once per request that took part."""
        return sum(self.accepted_lengths.values())

    @property
    def accept_length(self) -> float:
        """Mean tokens accepted per request and verify step; 0 before the first step."""
        accepted = sum(length * count for length, count in self.accepted_lengths.items())
        return accepted / self.num_verifies if accepted else 0.0


@dataclass
class _Counts:
    """Counters of requests."""

    new_tokens: int = 0
    accepted: Counter[int] = field(default_factory=Counter)
    drafted: Counter[int] = field(default_factory=Counter)

    def add(self, request: Request) -> None:
        self.new_tokens += len(request.output_ids)
        self.accepted.update(request.accepted_lengths)
        self.drafted.update(request.drafted_lengths)


class Tally:
    """Counts the requests that have ended, and keeps their tokens and errors for the next step."""

    def __init__(self) -> None:
        self._counts = _Counts()
        self._ended: dict[Request, None] = {}
        """Requests whose last tokens no step has returned, in the order in which they ended."""
        self._errors: list[Exception] = []
        """Errors of requests that no step has raised."""

    def end(self, requests: Iterable[Request]) -> None:
        """Count finished requests, each once even if an interrupted call is repeated."""
        for request in requests:
            if request in self._ended:
                continue
            self._ended[request] = None
            self.add(request)
            if request.error is not None:
                self._errors.append(request.error)

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
        ended = list(self._ended)
        new_tokens = [
            (request, request.output_ids[request.num_returned :])
            for request in (*ended, *started)
            if len(request.output_ids) > request.num_returned
        ]
        for request, tokens in new_tokens:
            request.num_returned += len(tokens)
        self._ended.clear()
        return new_tokens, ended

    def add(self, request: Request) -> None:
        """Add the counters of a request."""
        self._counts.add(request)

    def stats(
        self, queue: RequestQueue, memory: RequestMemory, runners: Iterable[Runner[Any, Any]]
    ) -> EngineStats:
        """Return the counts, unfinished requests included."""
        total = copy.deepcopy(self._counts)
        for request in queue.started:
            total.add(request)
        replays: Counter[str] = Counter()
        fallbacks: dict[str, Counter[str]] = {}
        for runner in runners:  # of several draft lengths, each has runners of the same modes
            stats = runner.stats
            replays[runner.label] += stats.replays
            if stats.fallbacks:
                fallbacks.setdefault(runner.label, Counter()).update(stats.fallbacks)
        return EngineStats(
            new_tokens=total.new_tokens,
            accepted_lengths=dict(sorted(total.accepted.items())),
            drafted_lengths=dict(sorted(total.drafted.items())),
            replays=replays,
            fallbacks=fallbacks,
            running=len(list(queue.admitted)),
            waiting=queue.num_waiting,
            preemptions=queue.num_preemptions,
            kv_usage=memory.held_slots / memory.total_slots,
        )
