"""A small speculative engine: requests join and leave, and every step goes through the runners."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, Self

import torch

from graphkit.config import BufferSizes
from graphkit.engine.drafter import Drafter
from graphkit.engine.generations import Core, HostInLoop, Overlapped, generation_of
from graphkit.engine.memory import RequestMemory, check_pools
from graphkit.engine.parts import EngineContext, EngineModel
from graphkit.engine.prompts import PromptReader
from graphkit.engine.queue import RequestQueue
from graphkit.engine.request import Request, SamplingParams, has_ended
from graphkit.engine.results import Events
from graphkit.engine.root import RootDrafter
from graphkit.engine.stats import EngineStats, Tally
from graphkit.engine.verifier import Batch
from graphkit.errors import ConfigError, ReplayError
from graphkit.graphs import Backend, backend_for
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
        backend = backend_for(device, backend)
        self.device = backend.device
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
                "backend": backend,
            },
        )
        generator = torch.Generator(self.device).manual_seed(seed)
        core = Core(target, drafter or RootDrafter(), context, generator)
        self.runners = core.runners
        """The runner of each mode."""
        # A step may follow the one that ends a request: v2 learns of it one step late.
        slots_ahead = core.drafter.max_path + core.slots_ahead
        self.limit = _limit(sizes, slots_ahead)
        """Most tokens of a request's prompt and output together."""
        self.memory = RequestMemory(pool, kv_pool.size, kv_pool.page_size)
        overlaps = self.generation == "v2"
        self._steps = Overlapped(core) if overlaps else HostInLoop(core, self.memory)
        self._queue = RequestQueue(
            PromptReader(core, pool.req_to_token, chunked_prefill_size, bos_token_id, generator),
            self.memory,
            limit=self.limit,
            slots_ahead=slots_ahead,
            max_running=sizes.max_batch_size,
            holds_all=overlaps,
        )
        self._batch: tuple[list[Request], Batch] | None = None
        self._tally = Tally()
        self._closed = False

    def capture(self, progress: Callable[[str], None] = lambda _what: None) -> None:
        """Capture the graphs of all runners that have none yet.

        Args:
            progress: Told what is done next.

        Raises:
            CaptureError: A forward cannot be captured. Runners before it keep their graphs, so that
                another call goes on from there.
            ReplayError: The engine is closed.
        """
        for runner in self.runners:
            if runner.status != "captured":
                progress(f"capturing {runner.mode.name}")
                runner.capture()

    def submit(self, prompt_ids: Sequence[int], sampling: SamplingParams | None = None) -> Request:
        """Queue a prompt; it joins the batch as soon as there is room.

        Raises:
            InputError: The prompt is empty and there is no ``bos_token_id``, holds what is no
                token, or is too long.
            ReplayError: The engine is closed.
        """
        self._check_open()
        request = self._queue.made(prompt_ids, sampling)
        self._queue.put([request])
        return request

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self._queue)

    @property
    def stats(self) -> EngineStats:
        """What was done so far."""
        return self._tally.stats(self._queue.running, self.runners)

    @torch.no_grad()
    def step(self) -> Events:
        """Admit what fits, make one step for all that run, let go of what has ended.

        Returns:
            New tokens by request, in order. v2 learns of a step's tokens in the next one. What a
            step that failed had learned, the next one tells.
        """
        self._queue.admit(self._steps.begin)
        self._let_go()
        if self._queue.running:
            self._steps.advance(self._queue.running, self._current_batch())
            self._let_go()
        if not self._queue.running:
            self._steps.drain()
        return self._steps.take_events()

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams | None = None
    ) -> list[Request]:
        """Continue all prompts to their ends; requests in the order of the prompts.

        Raises:
            InputError: As ``submit``; then none of them is queued.
        """
        self._check_open()
        requests = [self._queue.made(prompt, sampling) for prompt in prompts]
        self._queue.put(requests)
        while self.has_work:
            self.step()
        return requests

    def close(self) -> None:
        """Give all graphs back, and what unfinished requests hold. May be called again."""
        if not self._closed:
            self._steps.drain()
            self._let_go(lambda _request: True)
            self._queue.clear()
            self._closed = True
            for runner in self.runners:
                runner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ReplayError("engine is closed: submit needs an open one. Make a new one.")

    def _let_go(self, is_over: Callable[[Request], bool] = has_ended) -> None:
        for request in self._queue.let_go(is_over):
            self._tally.add(request)

    def _current_batch(self) -> Batch:
        """The running requests on the device; made anew only when they change."""
        running = self._queue.running
        if self._batch is None or self._batch[0] != running:
            self._batch = list(running), Batch.of(running, self.device)
        return self._batch[1]


def _limit(sizes: BufferSizes, slots_ahead: int) -> int:
    if sizes.max_context_len - slots_ahead < 2:
        raise ConfigError(
            f"BufferSizes.max_context_len is {sizes.max_context_len}, of which two steps may write "
            f"{slots_ahead} ahead. Make it larger.",
            field="max_context_len",
        )
    return sizes.max_context_len - slots_ahead
