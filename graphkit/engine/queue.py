"""Requests that wait and requests that run, and what each of them holds."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch

from graphkit.engine.memory import RequestMemory
from graphkit.engine.prompts import PromptReader
from graphkit.engine.request import Request, SamplingParams
from graphkit.errors import InputError


class RequestQueue:
    """First come, first served; a request joins as soon as it can be promised all its slots.

    Args:
        prompts: Reads the prompt of a request that joins.
        memory: Where rows and slots come from.
        limit: Most tokens of a request's prompt and output together.
        slots_ahead: Slots behind them that steps may write.
        max_running: Most requests that run at once.
        holds_all: Whether a request holds all its slots from the beginning.

    Attributes:
        running: In the order in which they joined.
    """

    def __init__(
        self,
        prompts: PromptReader,
        memory: RequestMemory,
        *,
        limit: int,
        slots_ahead: int,
        max_running: int,
        holds_all: bool,
    ) -> None:
        self._prompts, self._memory, self._limit = prompts, memory, limit
        self._slots_ahead, self._max_running = slots_ahead, max_running
        self._holds_all = holds_all
        self._waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def __bool__(self) -> bool:
        return bool(self._waiting or self.running)

    def made(self, prompt_ids: Sequence[int], sampling: SamplingParams | None) -> Request:
        """A request that can be served, not queued yet.

        Raises:
            InputError: It never could be.
        """
        request = Request(
            prompt_ids=self._prompts.checked(prompt_ids, self._limit),
            sampling=sampling or SamplingParams(),
            limit=self._limit,
        )
        slots = self._memory.whole_pages(self._most_tokens(request))
        if slots > self._memory.total_slots:
            raise InputError(
                f"a request of up to {request.most_tokens} tokens takes {slots} KV slots; the pool "
                f"has {self._memory.total_slots}. Ask for fewer new tokens.",
                field="prompt_ids",
            )
        return request

    def put(self, requests: Sequence[Request]) -> None:
        """Let them wait."""
        self._waiting += requests

    def admit(self, begin: Callable[[Request, torch.Tensor], None]) -> None:
        """Read the prompts of waiting requests while there is room.

        Args:
            begin: Takes over a request and its first new token.
        """
        while self._waiting and self._has_room_for(self._waiting[0]):
            first_token = self._read(self._waiting[0])
            request = self._waiting.popleft()
            self.running.append(request)
            begin(request, first_token)

    def let_go(self, is_over: Callable[[Request], bool]) -> list[Request]:
        """Free what such requests hold. Work in flight writes before whoever gets it next."""
        over = [request for request in self.running if is_over(request)]
        for request in over:
            self._release(request)
        self.running = [request for request in self.running if request.row]
        return over

    def clear(self) -> None:
        """Let nobody wait any more."""
        self._waiting.clear()

    def _read(self, request: Request) -> torch.Tensor:
        """Read its prompt; if that fails it holds nothing, and waits as before."""
        most = self._most_tokens(request)
        request.row = self._memory.open(most)
        length = most if self._holds_all else len(request.prompt_ids)
        self._memory.reserve([(request.row, length)])
        try:
            return self._prompts.read(request)
        except BaseException:
            self._release(request)
            raise

    def _release(self, request: Request) -> None:
        self._memory.close(request.row)
        request.row = 0

    def _has_room_for(self, request: Request) -> bool:
        has_place = len(self.running) < self._max_running
        return has_place and self._memory.has_room(self._most_tokens(request))

    def _most_tokens(self, request: Request) -> int:
        """Tokens whose slots it may come to hold: its own, and what steps write ahead."""
        return request.most_tokens + self._slots_ahead
