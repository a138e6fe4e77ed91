"""Generation v3: steps run in device loops, and the host reads their reports meanwhile."""

from __future__ import annotations

from collections import deque

from graphkit.engine.request import Request
from graphkit.engine.request_memory import SlotReservation
from graphkit.engine.schedule import PendingReport, RunningBatch, Schedule
from graphkit.engine.step import SpecStepInputs, SpecStepRunner, StepStream
from graphkit.ops.loop_layout import Report


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
        self._drafts = [variant.drafts for variant in runner.spec_step.by_length]

    @property
    def runners(self) -> tuple[SpecStepRunner]:
        """The runner of the whole step."""
        return (self._runner,)

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
        replays = is_prefilling and not self._streams and len(self._drafts) == 1
        if replays or not self._runner.can_launch:
            super().advance(batch, is_anyone_waiting=is_anyone_waiting, is_prefilling=is_prefilling)
            return
        if not self._streams:
            self._is_interrupted = False
            self._by_row = {request.row: request for request in batch.requests}
            most = 1 if is_prefilling else self._slots.steps_at_once
            self._launch(batch, most, is_anyone_waiting=is_anyone_waiting)
            self._deliver(len(self._pending))  # first tokens and eager steps precede the loop's
        is_last = is_anyone_waiting or is_prefilling or self._is_interrupted
        is_next_due = len(self._streams) == 1 and not is_last
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
            drafts = self._drafts[step.length if len(self._drafts) > 1 else 0]
            for row in step.rows:
                self._by_row[row[Report.ROW]].receive(row, drafts)
        if stream.end is not None:
            self._streams.popleft()
