"""Loops over a step on the device, and their captures: a body per captured size and variant."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import torch

from graphkit.distributed import RankGroup
from graphkit.engine.step.loop_state import LaunchInputs, LaunchOutput, LoopLauncher, LoopState
from graphkit.engine.step.spec_step import SpecStep, SpecStepInputs, SpecStepOutput
from graphkit.engine.step.step_stream import LoopReader, StepStream
from graphkit.errors import ReplayError
from graphkit.graphs import Backend, CapturedGraph, CaptureFailure, LoopGraph, SizeTable, scope
from graphkit.ops.loop_layout import Control
from graphkit.records import LoopBody, LoopRecord, ReplayStats
from graphkit.runners import StepRunner
from graphkit.runners.capture import SizeCapture, capture_error
from graphkit.runners.step import Step, output_tensors
from graphkit.spec import ForwardMode

LoopStep = Callable[[SpecStepInputs], SpecStepOutput]
"""A step that a body runs."""


class _LoopBody(Step[SpecStepOutput]):
    """A step whose rows the loop writes, so that its graphs have no refresh."""

    def graph_function(self, size: int) -> Callable[[], dict[str, torch.Tensor]]:
        """Return the padded step alone."""
        return partial(output_tensors, self.padded_function(size))


@dataclass(frozen=True, slots=True)
class Loop:
    """A loop, its bodies (all of the first size, then of the next), and the sizes."""

    graph: LoopGraph
    bodies: Sequence[CapturedGraph]
    table: SizeTable


class LoopCapture:
    """Captures loops, and keeps their graphs.

    Args:
        runner: Runner of the step, which gives sizes and buffers.
        backend: Backend that captures.
        state: What the loops share.

    Attributes:
        prologue: Runner of the prologue, before ``capture`` ``None``.
        launcher: Launches loops; exists from ``capture`` on.
        loops: The loops, by whether they are greedy.
    """

    def __init__(
        self,
        runner: StepRunner[SpecStepInputs, SpecStepOutput],
        backend: Backend,
        state: LoopState,
    ) -> None:
        self._backend, self._state = backend, state
        self._buffers, self._spec, self._table = runner.buffers, runner.spec, runner.table
        self._sizes = replace(runner.sizes, max_batch_size=runner.table.largest)
        self.prologue: StepRunner[LaunchInputs, LaunchOutput] | None = None
        self.launcher: LoopLauncher
        self.loops: dict[bool, Loop] = {}
        self._times: dict[int, list[float]] = {}

    def capture(self, steps: Mapping[bool, Sequence[LoopStep]], table: SizeTable | None) -> None:
        """Capture a loop over some steps; see ``DeviceLoops.capture``. The caller closes it."""
        self.prologue = StepRunner(
            self._state.begin,
            inputs=LaunchInputs,
            output=LaunchOutput,
            sizes=self._sizes,
            backend=self._backend,
            batch_sizes=[self._table.largest],
            check=False,  # launches are validated on the host
        )
        self.launcher = LoopLauncher(self.prologue.buffers)
        self.prologue.capture()
        for is_greedy, variants in steps.items():
            self.loops[is_greedy] = self._capture_loop(variants, table or self._table)
        if self._state.lengths is not None and table is None:
            self._times = self._measure()
            self._state.lengths.set_times(list(self._times.values()))
        self._state.clear()

    def records(self) -> tuple[LoopRecord, ...]:
        """Return the composition of each loop; nothing before the capture."""
        if self.prologue is None:
            return ()
        (prologue,) = self.prologue.graphs.values()
        return tuple(
            LoopRecord(
                kind="greedy" if is_greedy else "sampled",
                prologue_nodes=loop.graph.num_nodes - sum(body.num_nodes for body in loop.bodies),
                bodies=tuple(self._body_records(loop)),
                pool_bytes=0 if index else prologue.pool_bytes,
                executable_bytes=loop.graph.executable_bytes
                + (0 if index else prologue.executable_bytes),
            )
            for index, (is_greedy, loop) in enumerate(self.loops.items())
        )

    def _capture_loop(self, steps: Sequence[LoopStep], table: SizeTable) -> Loop:
        assert self.prologue is not None, "capture has captured it"
        self._state.rows.zero_()  # captures run on pads
        largest = self._table.largest
        with ExitStack() as failed:
            captured = []
            for index, step in enumerate(steps):
                graphs = self._capture_bodies(step, index, table)
                captured.append(graphs)
                for graph in graphs.values():
                    failed.callback(graph.close)
            bodies = [graphs[size] for size in table for graphs in captured]
            conditions = map(self._state.condition, (Control.AGAIN, Control.BODY))
            try:
                loop = self._backend.loop(self.prologue.graphs[largest], bodies, *conditions)
            except CaptureFailure as error:
                raise capture_error(ForwardMode.STEP, largest, error) from error
            failed.pop_all()
        return Loop(loop, bodies, table)

    def _capture_bodies(
        self, step: LoopStep, index: int, table: SizeTable
    ) -> dict[int, CapturedGraph]:
        """Capture one of a size's bodies at all sizes."""

        def body(inputs: SpecStepInputs) -> SpecStepOutput:
            output = step(inputs)
            assert output.report is not None, "a body has rows"
            with scope("advance"):
                self._state.advance(output.report, index)
            return output

        mode = ForwardMode.STEP
        loop_body = _LoopBody(
            body, mode, mode, self._spec, self._sizes, SpecStepOutput, self._buffers, None
        )
        return SizeCapture(loop_body, table, self._backend, {}).capture()

    def _measure(self) -> dict[int, list[float]]:
        """Return the mean time of greedy and sampled steps, by size, of each body."""
        loops = [loop.bodies for loop in self.loops.values()]
        times = [
            sum(map(self._backend.measure, bodies)) / len(loops)
            for bodies in zip(*loops, strict=True)
        ]
        per_size = len(times) // len(self._table.sizes)
        firsts = range(0, len(times), per_size)
        return {
            size: times[first : first + per_size]
            for size, first in zip(self._table, firsts, strict=True)
        }

    def _body_records(self, loop: Loop) -> Iterator[LoopBody]:
        lengths = self._state.lengths
        all_drafts = [None] if lengths is None else lengths.drafts
        keys = product(loop.table, enumerate(all_drafts))
        for (size, (index, drafts)), body in zip(keys, loop.bodies, strict=True):
            catches_up, rows = lengths is not None and index == lengths.count, None
            if lengths is not None:
                row_counts = lengths.row_counts[self._table.sizes.index(size)].tolist()
                rows = row_counts[0 if catches_up else index]
            yield LoopBody(
                batch_size=size,
                num_nodes=body.num_nodes,
                drafts=drafts,
                rows=rows,
                catches_up=catches_up,
                replay_us=self._times[size][index] if size in self._times else None,
                pool_bytes=body.pool_bytes,
                executable_bytes=body.executable_bytes,
            )


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

    @property
    def seconds(self) -> tuple[float, float]:
        """Times of plain decoding and of the steps before the last one that was read."""
        plain, steps = self._reader.times
        return plain / 1e9, steps / 1e9

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
        """Launch a loop; see ``SpecStepRunner.launch``."""
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
