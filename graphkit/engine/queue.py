"""Queue of waiting requests and the batch of running ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain

import torch

from graphkit.engine.request import Request
from graphkit.engine.request_memory import RequestMemory
from graphkit.engine.token_matcher import TokenMatcher, check_matcher, root_bitmask
from graphkit.errors import InputError
from graphkit.step import Admission, SamplingParams


class RequestQueue:
    """Admits requests in order of submission, each as soon as it can be promised all its KV slots.

    Args:
        admission: Checks requests, and prefills the prompt of an admitted one.
        memory: Provides rows and slots.
        slots_ahead: KV slots that steps may write behind a request's tokens.
        max_running: Most requests that run at the same time.
        reserve_all: Whether a request's slots are all reserved when it is admitted.
        fails_alone: Whether an exception in a prefill ends that request alone, not the step.

    Attributes:
        running: The running requests, in the order of admission.
    """

    def __init__(
        self,
        admission: Admission,
        memory: RequestMemory,
        *,
        slots_ahead: int,
        max_running: int,
        reserve_all: bool,
        fails_alone: bool,
    ) -> None:
        self._admission, self._memory = admission, memory
        self._slots_ahead, self._max_running = slots_ahead, max_running
        self._reserve_all, self._fails_alone = reserve_all, fails_alone
        self._waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def __bool__(self) -> bool:
        return bool(self._waiting or self.running)

    @property
    def can_admit(self) -> bool:
        """Whether a request is waiting that has room now."""
        return bool(self._waiting) and self._has_room_for(self._waiting[0])

    @property
    def requests(self) -> Iterator[Request]:
        """All requests, the running ones first."""
        return chain(self.running, self._waiting)

    @property
    def num_waiting(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    def create(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams | None,
        matcher: TokenMatcher | None = None,
    ) -> Request:
        """Create a request without queueing it.

        Raises:
            InputError: The prompt or the parameters are invalid, the request needs more slots than
                the pool has, or the matcher cannot constrain it.
        """
        ids, params = self._admission.check(prompt_ids, sampling)
        if matcher is not None:
            self._check_matcher(matcher)
        request = Request(
            prompt_ids=ids,
            sampling=params,
            context_limit=self._admission.context_limit,
            matcher=matcher,
        )
        slots = self._memory.whole_pages(self._max_slots(request))
        if slots > self._memory.total_slots:
            raise InputError(
                f"a request of up to {request.max_tokens} tokens needs {slots} KV slots, but the "
                f"pool has {self._memory.total_slots}. Reduce max_new_tokens, or enlarge the pool.",
                field="prompt_ids",
            )
        return request

    def put(self, requests: Sequence[Request]) -> None:
        """Append requests to the queue."""
        self._waiting += requests

    def admit(self, begin: Callable[[Request, torch.Tensor], None]) -> None:
        """Prefill waiting requests in order while there is room.

        Args:
            begin: Called with each admitted request and the report of its first new token.
        """
        while self.can_admit:
            request = self._waiting[0]
            self.running.append(request)  # first, so that it is always in one of both
            self._waiting.popleft()
            try:
                report = self._start(request)
            except Exception as error:
                if not self._fails_alone:
                    raise
                request.fail(error)
            else:
                begin(request, report)

    def remove(self, requests: Sequence[Request]) -> None:
        """Remove running requests and free their rows and slots.

        A step that is still in flight may write to the freed slots. Streams are ordered, so it does
        so before the next owner writes there.
        """
        for request in requests:
            self._memory.free_row(request.row)
            request.row = 0
        self.running = [request for request in self.running if request.row]

    def requeue(self) -> list[Request]:
        """Put all running requests before the waiting ones, and free all rows and slots.

        The next ``admit`` prefills their prompts and outputs. May be called again after an
        exception at any line of this object.

        Returns:
            Those that have finished, which are dropped.
        """
        requests = list(dict.fromkeys(self.requests))
        for request in requests:
            request.resume()
        self._waiting = deque(request for request in requests if not request.is_finished)
        self.running = [request for request in requests if request.is_finished]
        self._memory.free_all()
        finished, self.running = self.running, []
        return finished

    def drop(self, request: Request) -> bool:
        """Drop a request if it is waiting; return whether it was."""
        is_waiting = request in self._waiting
        if is_waiting:
            self._waiting.remove(request)
        return is_waiting

    def clear(self) -> list[Request]:
        """Drop all waiting requests, and return them."""
        waiting, self._waiting = self._waiting, deque()
        return list(waiting)

    def _check_matcher(self, matcher: TokenMatcher) -> None:
        if any(request.matcher is matcher for request in (*self._waiting, *self.running)):
            raise InputError(
                "the matcher belongs to another request, which has not finished. Create one for "
                "each request.",
                field="matcher",
            )
        check_matcher(matcher, self._admission.vocab_size)

    def _start(self, request: Request) -> torch.Tensor:
        """Allocate memory, and prefill the prompt and the output so far."""
        max_slots = self._max_slots(request)
        request.row = self._memory.allocate_row(max_slots)
        length = max_slots if self._reserve_all else request.num_tokens
        matcher = request.matcher
        self._memory.reserve([(request.row, length)])
        return self._admission.prefill(
            request.row,
            (*request.prompt_ids, *request.output_ids),
            request.sampling,
            request.max_tokens - request.num_tokens,
            None if matcher is None else root_bitmask(matcher, self._admission.vocab_size),
        )

    def _has_room_for(self, request: Request) -> bool:
        is_below_limit = len(self.running) < self._max_running
        return is_below_limit and self._memory.has_room(self._max_slots(request))

    def _max_slots(self, request: Request) -> int:
        """Return the slots of the longest possible text and of what steps write ahead."""
        return request.max_tokens + self._slots_ahead
