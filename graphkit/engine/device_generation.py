"""Generation v3: steps run in device loops, and the host reads their reports meanwhile."""

from __future__ import annotations

from graphkit.engine.generations import Overlapped, RunningBatch
from graphkit.engine.request import Request
from graphkit.engine.transfers import PendingReport, deliver
from graphkit.ops.loop_layout import Report
from graphkit.step import SpecStepInputs, SpecStepRunner, StepReport, StepResult, StepStream


class OnDevice(Overlapped):
    """Generation v3: one launch runs many steps; the device removes requests that have ended.

    Until the runner has been captured, each step runs as in v2, and is a fallback of the runner. A
    runner of several ranks has no loops: each of its steps is one launch.

    Args:
        runner: Runs the steps.
        steps_per_launch: Most steps of a launch.
    """

    def __init__(self, runner: SpecStepRunner, steps_per_launch: int) -> None:
        super().__init__(runner.device_step)
        self._runner, self._steps_per_launch = runner, steps_per_launch
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

    def advance(self, batch: RunningBatch, *, is_anyone_waiting: bool) -> None:
        """Launch a loop if none runs, and deliver what has arrived, at least one step."""
        if not self._runner.can_launch:
            super().advance(batch, is_anyone_waiting=is_anyone_waiting)
            return
        if self._stream is None:
            self._stream = self._launch_loop(batch, is_anyone_waiting)
            self._deliver(len(self._pending))
        self._read(self._stream)

    def drain(self) -> None:
        """See ``Generation.drain``. Stops a running loop."""
        super().drain()
        while self._stream is not None:
            self._stream.stop()
            self._read(self._stream)

    def _launch(self, batch: RunningBatch) -> None:
        """Enqueue a whole step: eagerly until the capture, then as one graph if none may loop."""
        if self._runner.status != "captured":
            super()._launch(batch)
            return
        # The copy to the host reads graph memory before the next step. The CPU copies nothing.
        is_host = self._runner.device.type == "cpu"
        output = self._runner.replay(SpecStepInputs(req_pool_indices=batch.rows), clone=is_host)
        assert output.report is not None, "a running batch has rows"
        self._pending.append(PendingReport.send(batch.requests, output.report, is_verify=True))

    def _draft_and_verify(self, batch: RunningBatch) -> StepResult:
        return self._runner.draft_and_verify(batch.rows, is_greedy=batch.is_greedy)

    def _launch_loop(self, batch: RunningBatch, is_anyone_waiting: bool) -> StepStream:
        self._by_row = {request.row: request for request in batch.requests}
        rows = list(self._by_row)
        until = rows if is_anyone_waiting else ()
        return self._runner.launch(rows, max_steps=self._steps_per_launch, until=until)

    def _read(self, stream: StepStream) -> None:
        """Wait for a step, and deliver all steps that are there."""
        for step in stream.available():
            self._deliver_step(step)
        if stream.end is not None:
            self._stream = None

    def _deliver_step(self, step: StepReport) -> None:
        lines = step.lines
        rows = ((self._by_row[line[Report.ROW]], line) for line in lines)
        self._new_tokens += deliver(rows, is_verify=True)
