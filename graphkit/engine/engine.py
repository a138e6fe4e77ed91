"""A small speculative engine: requests join and leave, and every step goes through the runners."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, Self

import torch

from graphkit.config import BufferSizes
from graphkit.engine.drafter import Drafter
from graphkit.engine.generations import (
    Core,
    Generation,
    HostInLoop,
    Overlapped,
    generation_of,
)
from graphkit.engine.memory import RequestMemory, check_pools
from graphkit.engine.parts import EngineContext, EngineModel
from graphkit.engine.prompts import PromptReader
from graphkit.engine.request import Request, SamplingParams
from graphkit.engine.results import Events
from graphkit.engine.root import RootDrafter
from graphkit.engine.stats import EngineStats, Tally
from graphkit.engine.verifier import Batch, Verifier
from graphkit.errors import ConfigError, InputError, ReplayError
from graphkit.graphs import Backend, backend_for
from graphkit.runners import Runner
from graphkit.spec import SpecConfig


class SpeculativeEngine:
    """Continues prompts by drafting, verifying, accepting and catching up, with captured graphs.

    Greedy output is token for token the target's own greedy decoding. Until ``capture`` was called,
    every step runs eagerly, with that reason counted. A context manager, which closes; for one
    thread.

    Args:
        target: The model whose output it is.
        drafter: Proposes tokens; ``None`` decodes plainly.
        spec: How to draft and verify.
        sizes: How large batches and contexts become. ``max_context_len`` counts drafts too: prompt
            and output together stay below it by what two steps may write ahead.
        batch_sizes: Sizes to capture; ``None`` takes the field's list.
        device, backend: As for ``Runner``; shared by all runners.
        generation: ``None`` takes what ``spec.plan()`` says; ``"v1"`` may be asked for always.
        chunked_prefill_size: Most prompt tokens that are read at once.
        bos_token_id: What an empty prompt is replaced by; without it, one is refused.
        seed: Of the draws for requests with a temperature.
        debug: Whether the future map checks that each result is picked up once. Waits for the
            device.

    Raises:
        ConfigError: The settings contradict each other, or the pools.
    """

    def __init__(
        self,
        target: EngineModel,
        drafter: Drafter | None = None,
        *,
        spec: SpecConfig,
        sizes: BufferSizes,
        batch_sizes: Iterable[int] | None = None,
        device: torch.device | str = "auto",
        backend: Backend | None = None,
        generation: Literal["v1", "v2"] | None = None,
        chunked_prefill_size: int = 512,
        bos_token_id: int | None = None,
        seed: int = 0,
        debug: bool = False,
    ) -> None:
        self.spec, self.sizes = spec, sizes
        self.generation = generation_of(spec, generation)
        self._backend = backend_for(device, backend)
        self.device = self._backend.device
        pool, kv_pool = target.attention.req_to_token_pool, target.attention.kv_pool
        check_pools(pool, spec, sizes)
        future_map = spec.resolved.create_future_map(
            pool.size, chunked_prefill_size, sizes.max_context_len, self.device
        )
        future_map.debug = debug
        context = EngineContext(
            spec=spec,
            sizes=sizes,
            generation=self.generation,
            future_map=future_map,
            req_to_token=pool.req_to_token,
            kv_slots=kv_pool.size,
            device=self.device,
            runner_options={
                "batch_sizes": None if batch_sizes is None else tuple(batch_sizes),
                "device": self.device,
                "backend": self._backend,
            },
        )
        drafter = drafter or RootDrafter()
        drafter.prepare(context)
        self._generator = torch.Generator(self.device).manual_seed(seed)
        self._verifier = Verifier(target, context, drafter.max_path, self._generator)
        self.runners: tuple[Runner[Any], ...] = (self._verifier.runner, *drafter.runners)
        """The runner of each mode."""
        ahead = max(context.verify_width, drafter.slots_needed)
        self._slots_ahead = drafter.max_path + ahead
        self.limit = sizes.max_context_len - self._slots_ahead
        """Most tokens of a request's prompt and output together."""
        if self.limit < 2:
            raise ConfigError(
                f"BufferSizes.max_context_len is {sizes.max_context_len}, of which two steps may "
                f"write {self._slots_ahead} ahead. Make it larger.",
                field="max_context_len",
            )
        self.memory = RequestMemory(pool, kv_pool.size, kv_pool.page_size)
        self._core = Core(self._verifier, drafter, context)
        self._steps: Generation = (
            Overlapped(self._core)
            if self.generation == "v2"
            else HostInLoop(self._core, self.memory, ahead)
        )
        self._prompts = PromptReader(
            self._core, pool.req_to_token, chunked_prefill_size, bos_token_id, self._generator
        )
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._batch: tuple[list[Request], Batch] | None = None
        self._tally = Tally()
        self._closed = False

    def capture(self, progress: Callable[[str], None] = lambda _what: None) -> None:
        """Capture the graphs of all runners.

        Args:
            progress: Told what is done next.

        Raises:
            CaptureError: A forward cannot be captured.
        """
        for runner in self.runners:
            progress(f"capturing {runner.mode.name}")
            runner.capture()

    def submit(self, prompt_ids: Sequence[int], sampling: SamplingParams | None = None) -> Request:
        """Queue a prompt; it joins the batch as soon as there is room.

        Raises:
            InputError: The prompt is empty and there is no ``bos_token_id``, holds what is no
                token, or is too long.
            ReplayError: The engine is closed.
        """
        request = self._request(prompt_ids, sampling)
        self._waiting.append(request)
        return request

    def _request(self, prompt_ids: Sequence[int], sampling: SamplingParams | None) -> Request:
        if self._closed:
            raise ReplayError("engine is closed: submit needs an open one. Make a new one.")
        request = Request(
            prompt_ids=self._prompts.checked(prompt_ids, self.limit),
            sampling=sampling or SamplingParams(),
            limit=self.limit,
        )
        slots = self.memory.whole_pages(self._most_tokens(request))
        if slots > self.memory.total_slots:
            raise InputError(
                f"a request of up to {request.most_tokens} tokens takes {slots} KV slots; the pool "
                f"has {self.memory.total_slots}. Ask for fewer new tokens.",
                field="prompt_ids",
            )
        return request

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self._waiting or self._running)

    @property
    def stats(self) -> EngineStats:
        """What was done so far."""
        return self._tally.stats(self._running, self.runners)

    @torch.no_grad()
    def step(self) -> Events:
        """Admit what fits, make one step for all that run, let go of what has ended.

        Returns:
            New tokens by request, in order. v2 learns of a step's tokens in the next one.
        """
        events = self._admit()
        self._let_go()
        if self._running:
            events += self._steps.advance(self._running, self._current_batch())
            self._let_go()
        if not self._running:
            events += self._steps.drain()
        return events

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams | None = None
    ) -> list[Request]:
        """Continue all prompts to their ends; requests in the order of the prompts.

        Raises:
            InputError: As ``submit``; then none of them is queued.
        """
        requests = [self._request(prompt, sampling) for prompt in prompts]
        self._waiting += requests
        while self.has_work:
            self.step()
        return requests

    def close(self) -> None:
        """Give all graphs back, and what unfinished requests hold. May be called again."""
        if not self._closed:
            self._steps.drain()
            for request in self._running:
                self._release(request)
            self._running, self._closed = [], True
            self._waiting.clear()
            for runner in self.runners:
                runner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _admit(self) -> Events:
        """Read the prompts of waiting requests while there is room, first come first served."""
        events: Events = []
        while self._waiting and self._has_room_for(self._waiting[0]):
            request = self._waiting[0]
            first_token = self._read(request)
            self._running.append(self._waiting.popleft())
            events += self._steps.begin(request, first_token)
        return events

    def _read(self, request: Request) -> torch.Tensor:
        """Read its prompt; if that fails it holds nothing, and waits as before."""
        most = self._most_tokens(request)
        request.row = self.memory.open(most)
        length = most if self.generation == "v2" else len(request.prompt_ids)
        self.memory.reserve([(request.row, length)])
        try:
            return self._prompts.read(request)
        except BaseException:
            self.memory.close(request.row)
            request.row = 0
            raise

    def _has_room_for(self, request: Request) -> bool:
        has_place = len(self._running) < self.sizes.max_batch_size
        return has_place and self.memory.has_room(self._most_tokens(request))

    def _most_tokens(self, request: Request) -> int:
        """Tokens whose slots it may come to hold: its own, and what steps write ahead."""
        return request.most_tokens + self._slots_ahead

    def _let_go(self) -> None:
        """Free what ended requests hold. Work in flight writes before whoever gets it next."""
        for request in self._running:
            if request.finish_reason is not None:
                self._release(request)
        self._running = [r for r in self._running if r.finish_reason is None]

    def _release(self, request: Request) -> None:
        self.memory.close(request.row)
        self._tally.add(request)
        request.row = 0

    def _current_batch(self) -> Batch:
        """The running requests on the device; made anew only when they change."""
        if self._batch is None or self._batch[0] != self._running:
            self._batch = list(self._running), Batch.of(self._running, self.device)
        return self._batch[1]
