"""Queue of waiting requests, the prefills of admitted ones, and the batch of running ones."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, takewhile
from weakref import WeakValueDictionary

import torch

from graphkit.engine.request import Request
from graphkit.engine.request_memory import RequestMemory, StepSlots
from graphkit.engine.step import Admission, SamplingParams
from graphkit.engine.step.request_state import Prefill
from graphkit.engine.step.step_requests import RequestChecks
from graphkit.engine.token_matcher import TokenMatcher, check_matcher, root_bitmask
from graphkit.errors import InputError

logger = logging.getLogger(__name__)


class RequestQueue:
    """Admits requests in order of submission, and prefills those that it has admitted.

    A request is admitted if the pool can hold its longest possible text beside those of all others.
    Otherwise it is admitted if there is room for its tokens so far and for a few steps of all
    requests: most requests end before their limit. If the pool runs out nevertheless, the latest
    admitted requests are preempted. They wait again, before all others, and prompt and output are
    prefilled again.

    Args:
        checks: Checks requests.
        admission: Prefills the prompts of admitted ones.
        memory: Provides rows and slots.
        step_slots: KV slots that steps need.
        max_running: Most requests that are admitted at the same time.
        spare_steps: Steps of all requests that must have room before another one is admitted.
        fails_alone: Whether an exception in a prefill ends that request alone, not the step.

    Attributes:
        running: The requests that take part in steps, in the order in which they joined.
        prefilling: Admitted requests whose prompts are not complete, in the order of admission.
        num_preemptions: Requests that were preempted, each time counted.
    """

    def __init__(
        self,
        checks: RequestChecks,
        admission: Admission,
        memory: RequestMemory,
        step_slots: StepSlots,
        *,
        max_running: int,
        spare_steps: int,
        fails_alone: bool,
    ) -> None:
        self._checks, self._admission = checks, admission
        self._memory, self._step_slots = memory, step_slots
        self._max_running, self._fails_alone = max_running, fails_alone
        self._spare = memory.whole_pages(spare_steps * step_slots.max_path)
        self._waiting: OrderedDict[Request, None] = OrderedDict()
        self._admitted: dict[Request, None] = {}
        self.running: list[Request] = []
        self.prefilling: dict[Request, Prefill] = {}
        self.num_preemptions = 0
        self._matchers: WeakValueDictionary[int, Request] = WeakValueDictionary()
        """Requests with a matcher, which they keep alive, by its id."""
        self._is_short = False
        """Whether a request was preempted and none has ended since."""

    def __bool__(self) -> bool:
        return bool(self._waiting or self._admitted)

    def __contains__(self, request: Request) -> bool:
        """Return whether a request waits or has been admitted."""
        return request in self._waiting or request in self._admitted

    @property
    def can_admit(self) -> bool:
        """Whether a request is waiting that has room now."""
        return bool(self._waiting) and self._has_room_for(next(iter(self._waiting)))

    @property
    def admitted(self) -> Iterable[Request]:
        """Requests that hold a row, in the order of admission."""
        return self._admitted.keys()

    @property
    def started(self) -> Iterator[Request]:
        """Requests that may have output: the admitted ones, and those that wait again."""
        again = takewhile(lambda request: request.num_admissions > 0, self._waiting)
        return chain(self._admitted, again)

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
        ids, params = self._checks.check(prompt_ids, sampling)
        if matcher is not None:
            self._check_matcher(matcher)
        request = Request(
            prompt_ids=ids,
            sampling=params,
            context_limit=self._checks.context_limit,
            matcher=matcher,
        )
        slots = self._memory.whole_pages(self._step_slots.most(request))
        if slots > self._memory.total_slots:
            raise InputError(
                f"a request of up to {request.max_tokens} tokens needs {slots} KV slots, but the "
                f"pool has {self._memory.total_slots}. Reduce max_new_tokens, or enlarge the pool.",
                field="prompt_ids",
            )
        return request

    def put(self, requests: Sequence[Request]) -> None:
        """Append requests to the queue."""
        self._waiting.update(dict.fromkeys(requests))
        for request in requests:
            self.claim_matcher(request)

    def claim_matcher(self, request: Request) -> None:
        """Refuse the request's matcher to others; an engine thread puts a request later."""
        if request.matcher is not None:
            self._matchers[id(request.matcher)] = request

    def admit(self) -> None:
        """Give rows and slots to waiting requests, in order, while there is room."""
        while self.can_admit:
            request = next(iter(self._waiting))
            self._admitted[request] = None  # first, so that it is always in one of both
            del self._waiting[request]
            prefill = self._start(request)
            if not request.is_finished:
                self.prefilling[request] = prefill

    def prefill(self, begin: Callable[[Sequence[Request], torch.Tensor], None]) -> None:
        """Prefill the next chunks of the admitted requests, in one forward.

        If the forward raises an exception, each request is prefilled alone, and fails alone.

        Args:
            begin: Called with the requests whose prompts are complete, and the reports of their
                first new tokens.
        """
        chunks = self._admission.chunks(
            self.prefilling.values(), is_anyone_running=bool(self.running)
        )
        for complete, report in self._prefilled(chunks):
            begin(complete, report)

    def _prefilled(
        self, chunks: Sequence[tuple[Prefill, int]]
    ) -> list[tuple[Sequence[Request], torch.Tensor]]:
        """Prefill chunks; return the requests that are complete and their reports."""
        owners = {prefill: request for request, prefill in self.prefilling.items()}
        try:
            report = self._admission.prefill(chunks)
        except Exception as error:
            if not self._fails_alone:
                raise
            if len(chunks) == 1:
                owners[chunks[0][0]].fail(error)
                return []
            logger.warning("Prefilling %d requests one by one after %r.", len(chunks), error)
            return [result for chunk in chunks for result in self._prefilled([chunk])]
        if report is None:
            return []
        complete = [owners[prefill] for prefill, _ in chunks if not prefill.left]
        for request in complete:
            del self.prefilling[request]
        self.running = [*self.running, *complete]
        return [(complete, report)]

    def preempt(self) -> None:
        """Free row and slots of the request that was admitted last, and let it wait again.

        No step of the request is in flight, and all its tokens have been delivered.
        """
        request = next(reversed(self._admitted))
        assert len(self._admitted) > 1, "submit refuses what the pool cannot hold alone"
        self._waiting[request] = None
        self._waiting.move_to_end(request, last=False)
        self._leave([request])
        self.num_preemptions, self._is_short = self.num_preemptions + 1, True

    def remove(self, requests: Sequence[Request]) -> None:
        """Remove admitted requests and free their rows and slots.

        A step that is still in flight may write to the freed slots. Streams are ordered, so it does
        so before the next owner writes there.
        """
        if requests:
            self._leave(requests)
            self._is_short = False

    def _leave(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._memory.free_row(request.row)
            request.row = 0
            self.prefilling.pop(request, None)
            del self._admitted[request]
        self.running = [request for request in self.running if request.row]

    def requeue(self) -> None:
        """Put all admitted requests before the waiting ones, and free all rows and slots.

        The next prefills are of their prompts and outputs. Those that have finished stay admitted,
        without a row, until ``drop_finished``. May be called again after an exception at any line
        of this object.
        """
        requests = list(dict.fromkeys((*self._admitted, *self._waiting)))
        for request in requests:
            request.resume()
        finished = [request for request in requests if request.is_finished]
        left = (request for request in requests if not request.is_finished)
        self._waiting, self._admitted = OrderedDict.fromkeys(left), dict.fromkeys(finished)
        self.running, self.prefilling = [], {}
        self._memory.free_all()

    def drop_finished(self) -> None:
        """Drop the admitted requests after ``requeue``, all of which have finished."""
        self._admitted = {}

    def drop(self, request: Request) -> bool:
        """Drop a request if it is waiting; return whether it was."""
        is_waiting = request in self._waiting
        if is_waiting:
            del self._waiting[request]
        return is_waiting

    def close(self) -> None:
        """Close the graphs of prompts. May be called again."""
        self._admission.close()

    def clear(self) -> list[Request]:
        """Drop all waiting requests, and return them."""
        waiting, self._waiting = self._waiting, OrderedDict()
        return list(waiting)

    def _check_matcher(self, matcher: TokenMatcher) -> None:
        owner = self._matchers.get(id(matcher))
        if owner is not None and not owner.is_finished:
            raise InputError(
                "the matcher belongs to another request, which has not finished. Create one for "
                "each request.",
                field="matcher",
            )
        check_matcher(matcher, self._checks.vocab_size)

    def _start(self, request: Request) -> Prefill:
        """Allocate row and slots; return what is to be prefilled.

        An exception of the matcher fails the request.
        """
        request.num_admissions += 1
        request.admitted_at = request.admitted_at or time.monotonic()
        request.row = self._memory.allocate_row(self._step_slots.most(request))
        has_room = self._memory.reserve([(request.row, self._step_slots.needed(request, 1))])
        assert has_room, "the caller has checked it"
        bitmask = None
        if request.matcher is not None:
            with request.matching():
                bitmask = root_bitmask(request.matcher, self._checks.vocab_size)
        ids = (*request.prompt_ids, *request.output_ids)
        outputs = len(request.output_ids)
        return Prefill(request.row, request.sampling, request.tokens_left, ids, bitmask, outputs)

    def _has_room_for(self, request: Request) -> bool:
        if len(self._admitted) >= self._max_running or not self._memory.available_rows:
            return False
        if self._memory.can_promise(self._step_slots.most(request)):
            return True
        spare = self._spare * len(self._admitted)
        needed = self._memory.whole_pages(self._step_slots.needed(request, 1))
        return not self._is_short and needed + spare <= self._memory.available_slots
