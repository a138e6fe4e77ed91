"""Steps that the host enqueues one by one: v1 and v2. See ``device_schedule`` for v3."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from graphkit.engine.request import Request
from graphkit.engine.request_memory import SlotReservation
from graphkit.engine.step import SpecStep, StepVariant
from graphkit.engine.step.acceptance import Links
from graphkit.engine.step.draft_lengths import HostLengths
from graphkit.engine.token_matcher import fill_tree
from graphkit.graphs import Backend
from graphkit.graphs.devices import to_device
from graphkit.ops.logits import bitmask_words
from graphkit.ops.loop_layout import Report
from graphkit.runners import Runner


class RunningBatch:
    """The running requests.

    Args:
        requests: The requests.
        device: The device.

    Attributes:
        is_greedy: Whether every temperature is 0.
        is_constrained: Whether a request has a matcher.
        row_list: Request rows, on the host.
    """

    def __init__(self, requests: Sequence[Request], device: torch.device) -> None:
        self.requests, self._device = list(requests), device
        self.row_list = [request.row for request in requests]
        self.is_greedy = not any(request.sampling.temperature for request in requests)
        self.is_constrained = any(request.matcher is not None for request in requests)

    @cached_property
    def rows(self) -> torch.Tensor:
        """Request rows on the device, [B] int64; copied at the first use, without waiting."""
        return to_device(self.row_list, self._device)

    def tree_bitmask(self, tokens: torch.Tensor, links: Links, vocab_size: int) -> torch.Tensor:
        """Return the tokens that may follow each node. Waits for the trees to arrive on the host.

        Nodes behind a refused draft, or behind the end of the output, allow every token. No
        accepted path reaches the former, and the request ends before the latter. A request whose
        matcher raises an exception fails, and allows every token.

        The matchers have accepted the tokens of the roots, and are in the same state afterwards.

        Args:
            tokens: Token of each node, [B, W] int64.
            links: Links of the trees.
            vocab_size: Tokens of the target's vocabulary (V).

        Returns:
            [B * W, ceil(V / 32)] int32 on the CPU.
        """
        width = tokens.shape[1]
        bitmask = torch.full((tokens.numel(), bitmask_words(vocab_size)), -1, dtype=torch.int32)
        trees = torch.stack([tokens, *links], 1).tolist()  # one copy
        for request, rows, tree in zip(self.requests, bitmask.split(width), trees, strict=True):
            if (matcher := request.open_matcher) is not None:
                with request.matching():
                    fill_tree(matcher, rows, tree, vocab_size)
                if request.is_finished:
                    rows.fill_(-1)
        return bitmask


@dataclass(frozen=True, slots=True)
class PendingReport:
    """A report on its way to the host.

    Attributes:
        requests: The requests of the step, in batch order.
        report: [B, 4 + 2 * longest path] int32 on the host; valid once ``copied`` has completed.
        copied: Recorded behind the copy; ``None`` on the CPU, where copies complete at once.
        variant: What the step ran; ``None`` for a prefill.
    """

    requests: tuple[Request, ...]
    report: torch.Tensor
    copied: torch.cuda.Event | None
    variant: StepVariant | None

    @classmethod
    def send(
        cls, requests: Sequence[Request], report: torch.Tensor, variant: StepVariant | None
    ) -> PendingReport:
        """Start the copy to the host on the current stream."""
        copied = torch.cuda.Event() if report.is_cuda else None
        on_host = report.to("cpu", non_blocking=True)
        if copied is not None:
            copied.record(torch.cuda.current_stream(report.device))
        return cls(tuple(requests), on_host, copied, variant)

    def deliver(self) -> None:
        """Wait for the copy, then append the tokens to every request that has not finished."""
        if self.copied is not None:
            self.copied.synchronize()
        drafts = None if self.variant is None else self.variant.drafts
        for request, row in zip(self.requests, self.report.tolist(), strict=True):
            request.receive(row, drafts)


class Schedule:
    """Runs steps and delivers their tokens to the requests.

    v2 enqueues a step before it reads the tokens of the one before, so that host and device work at
    the same time. The host learns one step late that a request has finished, and drops the tokens
    of the extra step. v1 waits for the tokens of each step before the draft model catches up, and
    leaves out the requests that have finished.

    A batch with a matcher makes the host wait between draft and verify: masks depend on the drafts,
    and on the tokens of all earlier steps.

    Args:
        step: The device's part of a step.
        slots: Reserves the KV slots.
        waits: Whether to wait for the tokens of each step (v1).
    """

    def __init__(self, step: SpecStep, slots: SlotReservation, *, waits: bool) -> None:
        self._step, self._slots, self._waits = step, slots, waits
        self._pending: deque[PendingReport] = deque()
        """Reports on their way to the host, of first tokens and of steps."""
        self._lengths: HostLengths | None = None
        if step.context.spec.is_adaptive:
            self._lengths = HostLengths(step, step.verifier.runner.table.sizes)

    @property
    def runners(self) -> tuple[Runner[Any, Any], ...]:
        """The runners of the steps, the target's first."""
        return self._step.runners

    @property
    def can_admit(self) -> bool:
        """Whether requests can join now."""
        return True

    def interrupt(self) -> None:
        """Let requests join soon; ``can_admit`` becomes true. Does not wait."""

    def make_room(self, batch: RunningBatch) -> bool:
        """Reserve slots for the next steps of a batch; return whether one step has them."""
        return self._slots.make_room(batch.requests, len(self._pending))

    def begin(self, requests: Sequence[Request], report: torch.Tensor) -> None:
        """Add prefilled requests; ``report`` has a row for the first token of each."""
        if self._lengths is not None:  # which counts for the requests that had the rows before
            self._lengths.begin([request.row for request in requests])
        self._pending.append(PendingReport.send(requests, report, None))
        if self._waits:
            self._deliver(len(self._pending))

    def advance(
        self,
        batch: RunningBatch,
        *,
        is_anyone_waiting: bool,  # noqa: ARG002
        is_prefilling: bool,  # noqa: ARG002
    ) -> None:
        """Run at least one step for the running requests, after ``make_room``.

        Args:
            batch: The running requests.
            is_anyone_waiting: Whether a request waits for another one to end.
            is_prefilling: Whether a prompt is to be continued before the next step.
        """
        self._slots.take(1)
        self._enqueue(batch)
        self._deliver(len(self._pending) - 1)

    def drain(self) -> None:
        """Wait for all tokens on their way to the host and deliver them."""
        self._deliver(len(self._pending))

    def reset(self) -> None:
        """Discard all tokens on their way to the host, after an interrupted step."""
        self._slots.forget_batch()
        self._pending.clear()

    def measure_lengths(self, backend: Backend) -> None:
        """Measure the steps of each draft length at each captured size, if there are several.

        Waits for the device.

        Args:
            backend: Backend of the captured graphs.
        """
        if self._lengths is not None:
            self._lengths.set_times(self._step.measure(backend))

    def _enqueue(self, batch: RunningBatch) -> None:
        """Enqueue a whole step. v2 does not wait for the device."""

        def fill_bitmask(tokens: torch.Tensor, links: Links) -> torch.Tensor:
            self.drain()  # the matchers accept what has been generated so far
            return batch.tree_bitmask(tokens, links, self._step.context.sizes.vocab_size)

        lengths = self._lengths
        result = self._step.draft_and_verify(
            batch.rows,
            is_greedy=batch.is_greedy,
            fill_bitmask=fill_bitmask if batch.is_constrained else None,
            variant=None if lengths is None else lengths.next_variant(batch.row_list),
        )
        self._pending.append(PendingReport.send(batch.requests, result.report, result.variant))
        if not self._waits:  # the drafter catches up on all rows, accepted or not
            self._step.catch_up(result)
            return
        report = self._pending[-1].report
        self._deliver(len(self._pending))
        accepted = report[:, Report.ACCEPTED].tolist()
        self._step.catch_up(
            result,
            [
                0 if request.is_finished else count
                for request, count in zip(batch.requests, accepted, strict=True)
            ],
        )

    def _deliver(self, count: int) -> None:
        """Wait for the oldest reports and deliver them."""
        for _ in range(count):
            pending = self._pending.popleft()
            pending.deliver()
            if self._lengths is not None and pending.variant is not None:
                self._lengths.observe(pending.report, pending.variant)
