"""Steps that the host enqueues one by one, v1 and v2, or as loops on the device, v3."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import torch

from graphkit.config import bitmask_words
from graphkit.engine.request import Request
from graphkit.engine.request_memory import SlotReservation
from graphkit.engine.step import SpecStep, SpecStepInputs, SpecStepRunner, StepStream, StepVariant
from graphkit.engine.step.acceptance import Links
from graphkit.engine.step.draft_lengths import HostLengths
from graphkit.engine.step.pad_steps import measure_steps
from graphkit.engine.token_matcher import fill_tree
from graphkit.graphs import Backend
from graphkit.graphs.devices import copied_to, to_device
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
        report: [B, 5 + 2 * longest path] int32 on the host; valid once ``copied`` has completed.
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
        for request, row in zip(self.requests, self.report.tolist(), strict=True):
            request.receive(row)


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
    def seconds(self) -> tuple[float, float]:
        """Times of plain decoding and of the steps so far, see ``EngineStats``."""
        return (0.0, 0.0) if self._lengths is None else self._lengths.seconds

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
        is_prefilling: bool,
    ) -> None:
        """Run at least one step for the running requests, after ``make_room``.

        No step runs if the tokens on their way to the host are the last ones of all requests.

        Args:
            batch: The running requests.
            is_anyone_waiting: Whether a request waits for another one to end.
            is_prefilling: Whether a prompt is to be continued before the next step.
        """
        if is_prefilling and self._lengths is not None:  # a prompt ran since the step before
            self._lengths.pause()
        if goes_on := self._goes_on(batch):
            self._slots.take(1)
            self._enqueue(batch)
        self._deliver(len(self._pending) - goes_on)

    def drain(self) -> None:
        """Wait for all tokens on their way to the host and deliver them."""
        self._deliver(len(self._pending))
        if self._lengths is not None:
            self._lengths.pause()

    def reset(self) -> None:
        """Discard all tokens on their way to the host, after an interrupted step."""
        self._slots.forget_batch()
        self._pending.clear()
        if self._lengths is not None:
            self._lengths.pause()

    def measure_lengths(self, backend: Backend) -> None:
        """Measure the steps of each draft length at each captured size, if there are several.

        Waits for the device.
        """
        if self._lengths is not None:
            self._lengths.set_times(measure_steps(self._step, backend))

    def _enqueue(self, batch: RunningBatch) -> None:
        """Enqueue a whole step. v2 does not wait for the device."""

        def fill_bitmask(tokens: torch.Tensor, links: Links) -> torch.Tensor:
            self.drain()  # the matchers accept what has been generated so far
            return batch.tree_bitmask(tokens, links, self._step.context.sizes.vocab_size)

        variant = num_drafts = None
        if self._lengths is not None:
            variant, num_drafts = self._lengths.next_variant(batch.row_list)
        if num_drafts is not None:
            num_drafts = copied_to(self._step.context.device, num_drafts)
        result = self._step.draft_and_verify(
            batch.rows,
            is_greedy=batch.is_greedy,
            fill_bitmask=fill_bitmask if batch.is_constrained else None,
            variant=variant,
            num_drafts=num_drafts,
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

    def _goes_on(self, batch: RunningBatch, steps: int = 0) -> bool:
        """Return whether a request may have tokens left after what is on its way to the host.

        Args:
            batch: The running requests.
            steps: Steps that have been launched. Like each report, a step has a token or more.
        """
        most = len(self._pending) + steps
        if any(request.tokens_left > most for request in batch.requests):
            return True  # mostly the first one: a step of v2 counts no reports
        reports = Counter(chain.from_iterable(pending.requests for pending in self._pending))
        return any(request.tokens_left > reports[request] + steps for request in batch.requests)

    def _deliver(self, count: int) -> None:
        """Wait for the oldest reports and deliver them."""
        for _ in range(count):
            pending = self._pending.popleft()
            pending.deliver()
            if self._lengths is not None and pending.variant is not None:
                self._lengths.observe(pending.report, pending.variant)


class DeviceSchedule(Schedule):
    """Generation v3: one launch runs many steps; the device removes requests that have ended.

    While no request waits, the next launch is enqueued before the steps of this one are read, so
    that the device does not wait for the host. Requests that end in this launch are pads there.

    Until the runner has been captured, each step runs as in v2, and is a fallback of the runner.
    If the runner has no loops, as on ranks that use NCCL, each step is one launch. Ranks read whole
    loops, so that all have seen the same steps when they launch the next one.

    A launch has as many steps as there are KV slots for, and the next one is enqueued only if it
    has slots, too. While prompts are prefilled, each step is one replay; with several draft lengths
    a launch of one step, because a replay has the longest length, and leaves out tokens that plain
    steps have stored.

    Args:
        runner: Runs the steps.
        slots: As for ``Schedule``. A launch has at most ``steps_at_once`` steps.
    """

    def __init__(self, runner: SpecStepRunner, slots: SlotReservation) -> None:
        super().__init__(runner.spec_step, slots, waits=False)
        self._runner = runner
        self._streams: deque[StepStream] = deque()
        self._launched_steps = 0
        """Most steps of the last launch."""
        self._is_interrupted = False
        self._by_row: dict[int, Request] = {}

    @property
    def runners(self) -> tuple[SpecStepRunner]:
        """The runner of the whole step."""
        return (self._runner,)

    @property
    def seconds(self) -> tuple[float, float]:
        """See ``Schedule.seconds``; of the steps of loops that have been read."""
        return self._runner.seconds

    @property
    def can_admit(self) -> bool:
        """Whether no loop is running."""
        return not self._streams

    def interrupt(self) -> None:
        """End the loops after the step that runs, so that requests can join."""
        if self._streams:
            self._streams[-1].stop()
            self._is_interrupted = True

    def make_room(self, batch: RunningBatch) -> bool:
        """See ``Schedule.make_room``. Loops that run have their slots."""
        return bool(self._streams) or super().make_room(batch)

    def advance(self, batch: RunningBatch, *, is_anyone_waiting: bool, is_prefilling: bool) -> None:
        """Launch loops if too few run, and deliver what has arrived, at least one step."""
        # A loop of one step costs more than a replay, which has the longest of several lengths.
        is_adaptive = self._step.context.spec.is_adaptive
        replays = is_prefilling and not self._streams and not is_adaptive
        if replays or not self._runner.can_launch:
            super().advance(batch, is_anyone_waiting=is_anyone_waiting, is_prefilling=is_prefilling)
            return
        if not self._streams:
            if not self._goes_on(batch):
                self._deliver(len(self._pending))
                return
            self._is_interrupted = False
            self._by_row = {request.row: request for request in batch.requests}
            most = 1 if is_prefilling else self._slots.steps_at_once
            self._launch(batch, most, is_anyone_waiting=is_anyone_waiting)
            self._deliver(len(self._pending))  # first tokens and eager steps precede the loop's
        is_last = is_anyone_waiting or is_prefilling or self._is_interrupted
        is_next_due = len(self._streams) == 1 and not is_last
        is_next_due = is_next_due and self._goes_on(batch, self._launched_steps)
        if is_next_due and self._slots.make_room(batch.requests, self._launched_steps):
            self._launch(batch, self._slots.steps_at_once, is_anyone_waiting=False)
        self._read()

    def drain(self) -> None:
        """See ``Schedule.drain``. Stops the loops; does not wait for loops of pads alone."""
        super().drain()
        self.interrupt()
        while self._streams and not all(request.is_finished for request in self._by_row.values()):
            self._read()
        self._streams.clear()
        self._runner.join_loops()

    def reset(self) -> None:
        """See ``Schedule.reset``. Stops the loops and waits for them."""
        super().reset()
        self._runner.stop_loops()
        self._streams.clear()

    def _enqueue(self, batch: RunningBatch) -> None:
        """Enqueue a whole step: eagerly until the capture, then as one graph."""
        # The next step overwrites the report in graph memory. On CUDA its copy to the host precedes
        # that on the stream. On the CPU the report is on the host already and nothing copies it.
        is_cpu = self._runner.device.type == "cpu"
        output = self._runner.run(SpecStepInputs(req_pool_indices=batch.rows), clone=is_cpu)
        assert output.report is not None, "a running batch has rows"
        longest = self._step.longest
        self._pending.append(PendingReport.send(batch.requests, output.report, longest))

    def _launch(self, batch: RunningBatch, most: int, *, is_anyone_waiting: bool) -> None:
        steps = self._slots.take(most)
        rows = batch.row_list
        until = rows if is_anyone_waiting else ()  # its memory is free as soon as one ends
        stream = self._runner.launch(rows, max_steps=steps, until=until)
        self._launched_steps = steps
        self._streams.append(stream)

    def _read(self) -> None:
        """Wait for a step of the oldest loop and deliver what has arrived; on ranks, the loop."""
        stream = self._streams[0]
        steps = stream.available() if self._runner.group is None else stream
        for step in steps:
            for row in step.rows:
                self._by_row[row[Report.ROW]].receive(row)
        if stream.end is not None:
            self._streams.popleft()
