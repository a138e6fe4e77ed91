"""Generation v3: steps run in device loops, and the host reads their reports meanwhile."""

from __future__ import annotations

from collections import deque

import torch

from graphkit.engine.generations import Generation, RunningBatch
from graphkit.engine.request import Request
from graphkit.engine.transfers import PendingReport, deliver
from graphkit.ops.loop_layout import Report
from graphkit.step import SpecStepInputs, SpecStepRunner, StepReport, StepStream


class OnDevice(Generation):
    """Generation v3: one launch runs many steps; the device removes requests that have ended.

    Until the runner has been captured, each step runs eagerly.

    Args:
        runner: Runs the steps.
        steps_per_launch: Most steps of a launch.
    """

    def __init__(self, runner: SpecStepRunner, steps_per_launch: int) -> None:
        super().__init__(runner.device_step)
        self._runner, self._steps_per_launch = runner, steps_per_launch
        self._pending: deque[PendingReport] = deque()
        self._stream: StepStream | None = None
        self._by_row: dict[int, Request] = {}

    @property
    def can_admit(self) -> bool:
        """Whether no loop is running."""
        return self._stream is None

    def interrupt(self) -> None:
        """End the loop after the step that runs, so that requests can join."""
        if self._stream is not None:
            self._stream.stop()

    def begin(self, request: Request, report: torch.Tensor) -> None:
        """See ``Generation.begin``. Does not wait; the next step delivers the token."""
        self._pending.append(PendingReport.send([request], report, is_verify=False))

    def advance(self, batch: RunningBatch, *, is_anyone_waiting: bool) -> None:
        """Launch a loop if none runs, and deliver what has arrived, at least one step."""
        if self._stream is None:
            earlier = len(self._pending)
            self._launch(batch, is_anyone_waiting)
            self._deliver_pending(earlier)
        if self._stream is not None:
            self._read(self._stream)

    def drain(self) -> None:
        """See ``Generation.drain``. Stops a running loop."""
        self._deliver_pending(len(self._pending))
        while self._stream is not None:
            self._stream.stop()
            self._read(self._stream)

    def _launch(self, batch: RunningBatch, is_anyone_waiting: bool) -> None:
        if not self._runner.can_launch:
            output = self._runner.run(SpecStepInputs(req_pool_indices=batch.rows))
            assert output.report is not None, "the batch is not empty"
            self._pending.append(PendingReport.send(batch.requests, output.report, is_verify=True))
            return
        self._by_row = {request.row: request for request in batch.requests}
        rows = list(self._by_row)
        self._stream = self._runner.launch(
            rows, max_steps=self._steps_per_launch, until=rows if is_anyone_waiting else ()
        )

    def _deliver_pending(self, count: int) -> None:
        for _ in range(count):
            self._new_tokens += self._pending.popleft().deliver()

    def _read(self, stream: StepStream) -> None:
        """Wait for a step, and deliver all steps that are there."""
        for step in stream.available():
            self._deliver(step)
        if stream.end is not None:
            self._stream = None

    def _deliver(self, step: StepReport) -> None:
        lines = step.lines
        rows = ((self._by_row[line[Report.ROW]], line) for line in lines)
        self._new_tokens += deliver(rows, is_verify=True)
