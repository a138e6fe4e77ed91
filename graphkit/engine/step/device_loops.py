"""Launches of loops over a step that run on the device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

import torch

from graphkit.distributed import RankGroup
from graphkit.engine.step.loop_capture import LoopCapture, LoopStep
from graphkit.engine.step.loop_state import LoopState
from graphkit.engine.step.spec_step import SpecStep, SpecStepInputs, SpecStepOutput
from graphkit.engine.step.step_stream import LoopReader, StepStream
from graphkit.errors import ReplayError
from graphkit.graphs import LoopGraph, SizeTable
from graphkit.ops.loop_layout import Control
from graphkit.records import LoopRecord, ReplayStats
from graphkit.runners import StepRunner


class DeviceLoops:
    """Captures steps as the bodies of loops, and launches the loops.

    All loops share rows, control and ring, so that one runs at a time. With a group, all ranks run
    the same loops together. If the host of one of them stops a launch or does not read its ring,
    the loops of all ranks end after the same step.

    Args:
        runner: Runner of the step, which gives sizes, backend and group. The loops write the rows
            of its buffers in place.
        step: The step, which gives the longest path and the draft lengths.
        ring_entries: Most steps that wait for the host to read them.

    Attributes:
        state: What the loops share on the device.
        no_loop_reason: Reason why the backend cannot loop, or an empty string.
    """

    def __init__(
        self,
        runner: StepRunner[SpecStepInputs, SpecStepOutput],
        step: SpecStep,
        ring_entries: int,
    ) -> None:
        group, self._table = runner.group, runner.table
        assert group is None or isinstance(group, RankGroup), "loops use the group's collectives"
        backend, self._group = runner.capturing_backend(), group
        self.no_loop_reason = backend.no_loop_reason
        rows = runner.buffers.live_rows("req_pool_indices", self._table.largest)
        self.state = LoopState(rows, self._table.sizes, step, ring_entries, group)
        self._captured = LoopCapture(runner, backend, self.state)
        self._reader = LoopReader(
            self.state.ring,
            self._poll,
            backend.check_device,
            counts_lengths=self.state.lengths is not None,
        )
        self._running: LoopGraph | None = None
        self._launched = 0
        self._is_launching = False

    def add_steps(self, stats: ReplayStats) -> ReplayStats:
        """Return the statistics of single steps with the steps of launches that have been read."""
        by_size, live_sizes = Counter(self._reader.steps_by_size), Counter(self._reader.live_sizes)
        rows = sum(size * count for size, count in by_size.items())
        pads = rows - sum(size * count for size, count in live_sizes.items())
        by_size.update(stats.replays_by_size)
        live_sizes.update(stats.live_sizes)
        del live_sizes[0]  # steps of pads alone
        drafted = Counter[int]()
        if (lengths := self.state.lengths) is not None:  # a single step has the longest
            drafted[lengths.drafts[lengths.count - 1]] += stats.replays
            for length, steps in self._reader.lengths.items():
                drafted[lengths.drafts[length]] += steps
        return replace(
            stats,
            replays=by_size.total(),
            padded_rows=stats.padded_rows + pads,
            replays_by_size=dict(sorted(by_size.items())),
            live_sizes=dict(sorted(live_sizes.items())),
            drafted_lengths=dict(sorted(drafted.items())),
        )

    def capture(
        self, steps: Mapping[bool, Sequence[LoopStep]], table: SizeTable | None = None
    ) -> None:
        """Capture a loop over some steps, by whether they are greedy. The device must be idle.

        Args:
            steps: What a body runs; of several draft lengths, one for each of a size's bodies, see
                ``SpecStep.variants``.
            table: Some of the sizes, for an estimate of memory: the loops cannot be launched and
                are to be closed. ``None`` captures all sizes.

        Raises:
            CaptureError: A size cannot be captured. Nothing of the attempt remains.
        """
        try:
            self._captured.capture(steps, table)
        except BaseException:
            self.close()
            raise

    def memory_parts(self) -> dict[str, list[torch.Tensor]]:
        """Return the tensors of the loops; see ``Runner.memory_parts``."""
        prologue = self._captured.prologue
        parts = {} if prologue is None else prologue.memory_parts()
        static = [*parts.get("static_buffers", ()), *self.state.tensors()]
        return parts | {"static_buffers": static}

    def records(self) -> tuple[LoopRecord, ...]:
        """Return the composition of each loop; nothing before the capture."""
        return self._captured.records()

    def launch(
        self, rows: Sequence[int], watched: Collection[int], max_steps: int, *, is_greedy: bool
    ) -> StepStream:
        """Launch a loop; see ``SpecStepRunner.launch``.

        Args:
            rows: Rows of the requests, valid.
            watched: Rows of ``rows`` at whose end the loop ends.
            max_steps: Most steps.
            is_greedy: Which loop.

        Raises:
            SizeError: The batch is larger than the largest size.
            ReplayError: Earlier launches have not been read, or may still fill the ring, or CUDA
                refused the launch.
        """
        if len(rows) > self._table.largest:
            self._table.fit(len(rows))  # raises
        if self._is_launching:  # an earlier launch raised an exception: its loop may run
            self.stop()
        self._reader.check_unread()
        if self._reader.steps_in_flight:
            self._reserve(max_steps)
        graph = self._captured.loops[is_greedy].graph
        self._is_launching, self._running = True, graph
        # Before the launch, so that no later one has the number of one that was interrupted.
        self._launched = number = self._launched + 1
        self._captured.launcher.launch(graph, rows, watched, max_steps, number)
        stream = self._reader.stream(number, max_steps)
        self._is_launching = False
        return stream

    def stop(self) -> None:
        """Stop all launches and wait for them. Their streams then contain all their steps."""
        self.state.ring.stop(self._launched)
        for loop in self._captured.loops.values():
            loop.graph.wait()
        self._reader.end_all()
        if self._captured.prologue is not None:  # the recorder may have discarded a launch
            self.state.ring.skip(int(self.state.control[Control.WRITTEN]))
            self._captured.prologue.buffers.mailbox.rewind()
        self._is_launching = False

    def join(self) -> None:
        """Make later work of the current stream run after the loops."""
        if self._running is not None:
            self._running.join()

    def close(self) -> None:
        """Stop the launches, wait for them, and close all graphs. Streams remain readable."""
        self.state.ring.stop(self._launched)
        captured, self._running = self._captured, None
        loops, captured.loops = captured.loops, {}
        with ExitStack() as last_first:  # closes all, even if a rank of a running loop has failed
            if captured.prologue is not None:
                last_first.callback(captured.prologue.close)
            last_first.callback(self._reader.end_all)  # ranks compare how many steps they ran
            for loop in loops.values():
                for body in loop.bodies:
                    last_first.callback(body.close)
                last_first.callback(loop.graph.close)

    def _poll(self) -> None:
        if self._running is None:
            return
        if self._group is None:
            self._running.poll()
        elif self.state.rows.is_cuda:  # the device goes on without the host
            self._group.require_open()
        else:
            self._group.run(self._running.poll)

    def _reserve(self, max_steps: int) -> None:
        """Refuse a launch whose first step may find the ring full of unread steps."""
        self._reader.collect()
        steps, entries = self._reader.steps_in_flight, self.state.ring.entries
        if steps and steps + max_steps > entries:
            raise ReplayError(
                f"earlier launches of {steps} steps have not been read to their end, and the ring "
                f"holds {entries}: a launch of {max_steps} more could find it full. Read the "
                "earlier streams first, or increase ring_entries."
            )
