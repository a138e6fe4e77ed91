"""The base of all generations: KV slots ahead of the steps, draft lengths, bitmasks, warm-ups.

KV slots are reserved for several steps at once, for fewer if the pool is short.

A batch with a matcher makes the host wait between draft and verify: masks depend on the drafts, and
on the tokens of all earlier steps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import product
from typing import Any

import torch

from graphkit.engine.request import Request
from graphkit.engine.request_memory import RequestMemory, StepSlots
from graphkit.engine.running_batch import PendingReport, RunningBatch
from graphkit.engine.step import DeviceStep, StepBody, StepResult
from graphkit.engine.step.acceptance import Links
from graphkit.engine.step.draft_lengths import HostLengths
from graphkit.engine.token_matcher import fill_tree
from graphkit.graphs import Backend
from graphkit.ops.logits import bitmask_words
from graphkit.runners import Runner

_STEPS_AHEAD = 1024
"""Steps for which slots are reserved while at least half of the pool is free: 16 of the longest
usual launches, so that writing the table costs less than a CUDA call per launch."""


class Schedule(ABC):
    """Runs steps and delivers their tokens to the requests.

    Args:
        device_step: The device's part of a step.
        memory: Provides the KV slots.
        step_slots: KV slots that steps need.
        steps_at_once: Most steps that one launch needs slots for.
    """

    def __init__(
        self,
        device_step: DeviceStep,
        memory: RequestMemory,
        step_slots: StepSlots,
        steps_at_once: int,
    ) -> None:
        self._device_step = device_step
        self._memory, self._step_slots, self._steps_at_once = memory, step_slots, steps_at_once
        self._batch: RunningBatch | None = None
        """The batch that slots are reserved for."""
        self._steps_left = 0
        """Steps of this batch that have slots."""
        self._pending: deque[PendingReport] = deque()
        """Reports on their way to the host, of first tokens and of steps."""
        self._chooser: HostLengths | None = None
        if device_step.context.spec.is_adaptive:
            self._chooser = HostLengths(device_step, device_step.verifier.runner.table.sizes)

    @property
    def runners(self) -> tuple[Runner[Any, Any], ...]:
        """The runners of the steps, the target's first."""
        return self._device_step.runners

    @property
    def can_admit(self) -> bool:
        """Whether requests can join now."""
        return True

    def interrupt(self) -> None:  # noqa: B027 - only loops run on without the host
        """Let requests join soon; ``can_admit`` becomes true. Does not wait."""

    def memory_parts(self) -> dict[str, list[torch.Tensor]]:
        """Return the tensors of all models of the step; see ``Runner.memory_parts``."""
        return self._device_step.memory_parts()

    def make_room(self, batch: RunningBatch) -> bool:
        """Reserve slots for the next steps of a batch; return whether one step has them."""
        if batch is not self._batch:
            self._batch, self._steps_left = batch, 0
        if not self._steps_left:
            self._steps_left = self._reserve(batch, len(self._pending))
        return self._steps_left > 0

    def give_back(self, batch: RunningBatch) -> None:
        """Free the slots that the next step does not need. No step is in flight."""
        self._memory.shrink(self._lengths(batch, 1))
        self._batch = None

    def _reserve(self, batch: RunningBatch, in_flight: int) -> int:
        """Reserve slots for as many steps as possible, and return how many.

        While most of the pool is free, that is for several launches: the table on the device is
        then rarely written.
        """
        steps = self._steps_at_once
        most, memory = max(steps, _STEPS_AHEAD), self._memory
        lengths = self._lengths(batch, in_flight + most)
        if 2 * memory.held_slots <= memory.total_slots and memory.reserve(lengths):
            return most
        while steps and not memory.reserve(self._lengths(batch, in_flight + steps)):
            steps //= 2
        return steps

    def _lengths(self, batch: RunningBatch, steps: int) -> Iterator[tuple[int, int]]:
        needed = self._step_slots.needed
        return ((request.row, needed(request, steps)) for request in batch.requests)

    @abstractmethod
    def begin(self, requests: Sequence[Request], report: torch.Tensor) -> None:
        """Add prefilled requests; ``report`` has a row for the first token of each."""

    @abstractmethod
    def advance(self, batch: RunningBatch, *, is_anyone_waiting: bool, is_prefilling: bool) -> None:
        """Run at least one step for the running requests, after ``make_room``.

        Args:
            batch: The running requests.
            is_anyone_waiting: Whether a request waits for another one to end.
            is_prefilling: Whether a prompt is to be continued before the next step.
        """

    def drain(self) -> None:
        """Wait for all tokens on their way to the host and deliver them."""
        self._deliver(len(self._pending))

    def reset(self) -> None:
        """Discard all tokens on their way to the host, after an interrupted step."""
        self._batch = None
        self._pending.clear()

    def _draft_and_verify(self, batch: RunningBatch) -> StepResult:
        fill = partial(self._fill_bitmask, batch.requests) if batch.is_constrained else None
        body = None
        if self._chooser is not None:
            body = self._chooser.next_body([request.row for request in batch.requests])
        return self._device_step.draft_and_verify(
            batch.rows, is_greedy=batch.is_greedy, fill_bitmask=fill, body=body
        )

    def _forget_rows(self, requests: Sequence[Request]) -> None:
        """Forget the requests that had the rows of new ones before."""
        if self._chooser is not None:
            self._chooser.begin([request.row for request in requests])

    def _deliver(self, count: int) -> None:
        """Deliver the oldest reports."""
        for _ in range(count):
            self._deliver_one(self._pending.popleft())

    def _deliver_one(self, pending: PendingReport) -> None:
        """Wait for a report and deliver it."""
        pending.deliver()
        if self._chooser is not None and pending.body is not None:
            self._chooser.observe(pending.report, pending.body)

    def measure_lengths(self, backend: Backend) -> None:
        """Measure the graphs that a step of each draft length replays, at each captured size.

        Does nothing with one length. Waits for the device. Does not count in the statistics.

        Args:
            backend: Backend of the captured graphs.
        """
        if self._chooser is not None:
            bodies, sizes = self._device_step.bodies, self._device_step.verifier.runner.table
            self._chooser.set_times(
                [[self._graph_time(backend, size, body) for body in bodies] for size in sizes]
            )

    def _graph_time(self, backend: Backend, size: int, body: StepBody) -> float:
        """Return the time of all graphs that a step of pads replays."""
        with ExitStack() as stack:
            for runner in self.runners:
                stack.enter_context(runner.without_stats())
            run = partial(self._run_pads, size, is_greedy=True, body=body)
            self._device_step.warm_up(backend, [run])
            counts = [runner.stats.replays for runner in self.runners]
            run()
            replays = [runner.stats.replays for runner in self.runners]
        total = 0.0
        for before, after, runner in zip(counts, replays, self.runners, strict=True):
            if after > before:
                with runner.buffers.replays_of_pads():
                    total += (after - before) * backend.measure(runner.graphs[size])
        return total

    def _fill_bitmask(
        self, requests: Sequence[Request], tokens: torch.Tensor, links: Links
    ) -> torch.Tensor:
        """Return the token bitmask of the requests' trees; see ``FillBitmask``."""
        self.drain()  # the matchers accept what has been generated so far
        vocab_size = self._device_step.context.sizes.vocab_size
        return tree_bitmask(requests, tokens, links, vocab_size)

    @abstractmethod
    def _catch_up(self, result: StepResult) -> None:
        """Let the drafter catch up on all accepted tokens of a step."""

    def warm_up(self, backend: Backend) -> None:
        """Run steps of pads, greedy and sampled, so that their kernels are compiled.

        Waits for the device. Does not count in the statistics of the runners.

        Raises:
            CaptureError: The step raised an exception.
        """
        sizes = {1, min(2, self._device_step.context.sizes.max_batch_size)}
        steps = product(sorted(sizes), (True, False), self._device_step.bodies)
        with ExitStack() as stack:
            for runner in self.runners:
                stack.enter_context(runner.without_stats())
            runs = [
                partial(self._run_pads, size, is_greedy=kind, body=body)
                for size, kind, body in steps
            ]
            self._device_step.warm_up(backend, runs)

    def _run_pads(self, batch_size: int, *, is_greedy: bool, body: StepBody) -> None:
        device = self._device_step.context.device
        pads = torch.zeros(batch_size, dtype=torch.int64, device=device)
        self._catch_up(self._device_step.draft_and_verify(pads, is_greedy=is_greedy, body=body))


def tree_bitmask(
    requests: Sequence[Request],
    tokens: torch.Tensor,
    links: Links,
    vocab_size: int,
) -> torch.Tensor:
    """Return the tokens that may follow each node. Waits for the trees to arrive on the host.

    Nodes behind a refused draft, or behind the end of the output, allow every token. No accepted
    path reaches the former, and the request ends before the latter. A request whose matcher raises
    an exception fails, and allows every token.

    Args:
        requests: The requests. Their matchers have accepted the tokens of the roots, and are in the
            same state afterwards.
        tokens: Token of each node, [B, W] int64.
        links: Links of the trees.
        vocab_size: Tokens of the target's vocabulary (V).

    Returns:
        [B * W, ceil(V / 32)] int32 on the CPU.
    """
    width = tokens.shape[1]
    bitmask = torch.full((tokens.numel(), bitmask_words(vocab_size)), -1, dtype=torch.int32)
    trees = torch.stack([tokens, *links], 1).tolist()  # one copy
    for request, rows, tree in zip(requests, bitmask.split(width), trees, strict=True):
        if (matcher := request.open_matcher) is not None:
            with request.matching():
                fill_tree(matcher, rows, tree, vocab_size)
            if request.is_finished:
                rows.fill_(-1)
    return bitmask
