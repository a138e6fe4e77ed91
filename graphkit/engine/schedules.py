"""Schedules: when the host waits for the device in a step. See ``device_schedule`` for v3.

v1 (host in the loop) waits for the accepted tokens of every step. The host knows which requests
have finished before the draft model catches up, and KV slots are reserved one step at a time.

v2 (overlapped) enqueues a step before it reads the tokens of the previous one, so host and device
work at the same time. The host learns one step late that a request has finished; the tokens of the
extra step are dropped, and KV slots are reserved when the request joins.

A batch with a matcher makes the host wait between draft and verify, in both: masks depend on the
drafts, and on the tokens of all earlier steps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product
from typing import Any

import torch

from graphkit.engine.request import Request
from graphkit.engine.request_memory import RequestMemory
from graphkit.engine.token_matcher import fill_tree
from graphkit.graphs import Backend
from graphkit.ops.logits import bitmask_words
from graphkit.ops.loop_layout import Report
from graphkit.runners import Runner
from graphkit.step import DeviceStep, StepBody, StepResult
from graphkit.step.acceptance import Links
from graphkit.step.draft_lengths import HostLengths
from graphkit.step.step_tensors import to_device


class RunningBatch:
    """The running requests.

    Args:
        requests: The requests.
        device: The device.

    Attributes:
        is_greedy: Whether every temperature is 0.
        is_constrained: Whether a request has a matcher.
    """

    def __init__(self, requests: Sequence[Request], device: torch.device) -> None:
        self.requests, self._device = list(requests), device
        self.is_greedy = not any(request.sampling.temperature for request in requests)
        self.is_constrained = any(request.matcher is not None for request in requests)

    @cached_property
    def rows(self) -> torch.Tensor:
        """Request rows on the device, [B] int64; copied at the first use, without waiting."""
        return to_device([request.row for request in self.requests], self._device)


@dataclass(frozen=True, slots=True)
class PendingReport:
    """A report on its way to the host.

    Attributes:
        requests: The requests of the step, in batch order.
        report: [B, 4 + longest path] int32 on the host; valid once ``copied`` has completed.
        copied: Recorded behind the copy; ``None`` on the CPU, where copies complete at once.
        body: What the step ran; ``None`` for a prefill.
    """

    requests: tuple[Request, ...]
    report: torch.Tensor
    copied: torch.cuda.Event | None
    body: StepBody | None

    @classmethod
    def send(
        cls, requests: Sequence[Request], report: torch.Tensor, body: StepBody | None
    ) -> PendingReport:
        """Start the copy to the host on the current stream."""
        copied = torch.cuda.Event() if report.is_cuda else None
        on_host = report.to("cpu", non_blocking=True)
        if copied is not None:
            copied.record(torch.cuda.current_stream(report.device))
        return cls(tuple(requests), on_host, copied, body)

    def deliver(self) -> None:
        """Wait for the copy, then append the tokens to every request that has not finished."""
        if self.copied is not None:
            self.copied.synchronize()
        drafts = None if self.body is None else self.body.drafts
        for request, row in zip(self.requests, self.report.tolist(), strict=True):
            request.receive(row, drafts)


class Schedule(ABC):
    """Runs steps and delivers their tokens to the requests.

    Args:
        device_step: The device's part of a step.
    """

    def __init__(self, device_step: DeviceStep) -> None:
        self._device_step = device_step
        self._lengths: HostLengths | None = None
        if device_step.context.spec.is_adaptive:
            self._lengths = HostLengths(device_step, device_step.verifier.runner.table.sizes)

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

    @abstractmethod
    def begin(self, request: Request, report: torch.Tensor) -> None:
        """Add a prefilled request; ``report`` is that of its first token."""

    @abstractmethod
    def advance(self, batch: RunningBatch, *, is_anyone_waiting: bool) -> None:
        """Run at least one step for the running requests.

        Args:
            batch: The running requests.
            is_anyone_waiting: Whether a request waits for another one to end.
        """

    @abstractmethod
    def drain(self) -> None:
        """Wait for all tokens on their way to the host and deliver them."""

    def reset(self) -> None:  # noqa: B027 - v1 keeps nothing between steps
        """Discard all tokens on their way to the host, after an interrupted step."""

    def _draft_and_verify(self, batch: RunningBatch) -> StepResult:
        fill = partial(self._fill_bitmask, batch.requests) if batch.is_constrained else None
        body = None
        if self._lengths is not None:
            body = self._lengths.next_body([request.row for request in batch.requests])
        return self._device_step.draft_and_verify(
            batch.rows, is_greedy=batch.is_greedy, fill_bitmask=fill, body=body
        )

    def _forget_row(self, request: Request) -> None:
        """Forget the request that had the row of a new one before."""
        if self._lengths is not None:
            self._lengths.begin(request.row)

    def _deliver_one(self, pending: PendingReport) -> None:
        """Wait for a report and deliver it."""
        pending.deliver()
        if self._lengths is not None and pending.body is not None:
            self._lengths.observe(pending.report, pending.body)

    def measure_lengths(self, backend: Backend) -> None:
        """Measure the graphs that a step of each draft length replays, at each captured size.

        Does nothing with one length. Waits for the device. Does not count in the statistics.

        Args:
            backend: Backend of the captured graphs.
        """
        if self._lengths is not None:
            bodies, sizes = self._device_step.bodies, self._device_step.verifier.runner.table
            self._lengths.set_times(
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
        return sum(
            (after - before) * backend.measure(runner.graphs[size])
            for before, after, runner in zip(counts, replays, self.runners, strict=True)
            if after > before
        )

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


class HostInLoop(Schedule):
    """Generation v1: waits for each step's tokens; reserves KV slots for one step at a time.

    Args:
        device_step: The device's part of a step.
        memory: Provides the slots.
    """

    def __init__(self, device_step: DeviceStep, memory: RequestMemory) -> None:
        super().__init__(device_step)
        self._memory = memory

    def begin(self, request: Request, report: torch.Tensor) -> None:
        """See ``Schedule.begin``. Waits for the token."""
        self._forget_row(request)
        PendingReport.send([request], report, None).deliver()

    def advance(
        self,
        batch: RunningBatch,
        *,
        is_anyone_waiting: bool,  # noqa: ARG002
    ) -> None:
        """See ``Schedule.advance``. Waits for verify, before the draft model catches up."""
        requests = batch.requests
        # The newest token of a request is its bonus token, which has no KV slot yet.
        ahead = self._device_step.slots_ahead - 1
        self._memory.reserve((r.row, r.num_tokens + ahead) for r in requests)
        result = self._draft_and_verify(batch)
        pending = PendingReport.send(requests, result.report, result.body)
        self._deliver_one(pending)
        accepted = pending.report[:, Report.ACCEPTED].tolist()
        catch_up = [
            0 if request.is_finished else count
            for request, count in zip(requests, accepted, strict=True)
        ]
        result.body.drafter.extend_accepted(result.verified, catch_up)
        for request in requests:
            if not request.is_finished:
                self._memory.shrink(request.row, request.num_tokens - 1)

    def drain(self) -> None:
        """Do nothing: every step delivers its own tokens."""

    def _catch_up(self, result: StepResult) -> None:
        counts = result.verified.counts.num_accepted_tokens.tolist()
        result.body.drafter.extend_accepted(result.verified, counts)


class Overlapped(Schedule):
    """Generation v2: enqueues a step before it reads the previous one's tokens.

    Args:
        device_step: The device's part of a step.
    """

    def __init__(self, device_step: DeviceStep) -> None:
        super().__init__(device_step)
        self._pending: deque[PendingReport] = deque()

    def begin(self, request: Request, report: torch.Tensor) -> None:
        """See ``Schedule.begin``. Does not wait; the next step delivers the token."""
        self._forget_row(request)
        self._pending.append(PendingReport.send([request], report, None))

    def advance(
        self,
        batch: RunningBatch,
        *,
        is_anyone_waiting: bool,  # noqa: ARG002
    ) -> None:
        """See ``Schedule.advance``. Waits for earlier steps only, after enqueueing this one."""
        self._enqueue(batch)
        self._deliver(len(self._pending) - 1)

    def drain(self) -> None:
        """See ``Schedule.drain``."""
        self._deliver(len(self._pending))

    def reset(self) -> None:
        """See ``Schedule.reset``."""
        self._pending.clear()

    def _enqueue(self, batch: RunningBatch) -> None:
        """Enqueue a whole step without waiting for the device."""
        result = self._draft_and_verify(batch)
        self._pending.append(PendingReport.send(batch.requests, result.report, result.body))
        self._catch_up(result)

    def _catch_up(self, result: StepResult) -> None:
        result.body.drafter.extend(result.verified)

    def _deliver(self, count: int) -> None:
        for _ in range(count):
            self._deliver_one(self._pending.popleft())


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
