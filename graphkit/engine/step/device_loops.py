"""Loops over captured steps that run on the device, and their launches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import torch

from graphkit.distributed import RankGroup
from graphkit.engine.step.draft_lengths import DraftLengths
from graphkit.engine.step.loop_launcher import LaunchInputs, LaunchOutput, LoopLauncher
from graphkit.engine.step.output_ring import OutputRing
from graphkit.engine.step.spec_step import SpecStep, SpecStepInputs, SpecStepOutput
from graphkit.engine.step.step_stream import LoopReader, StepStream
from graphkit.errors import ReplayError
from graphkit.graphs import CapturedGraph, CaptureFailure, LoopGraph, SizeTable, scope
from graphkit.ops.device_loop import advance_loop, begin_loop, end_signals
from graphkit.ops.loop_layout import Control
from graphkit.records import LoopBody, LoopRecord, ReplayStats
from graphkit.runners import StepRunner
from graphkit.runners.capture import SizeCapture, capture_error
from graphkit.runners.known_memory import attribute_tensors
from graphkit.runners.step import Step, stage_tensors
from graphkit.spec import ForwardMode

LoopStep = Callable[[SpecStepInputs], SpecStepOutput]
"""A step that a body runs."""


class _LoopBody(Step[SpecStepOutput]):
    """A step whose rows the loop writes, so that its graphs have no refresh."""

    def graph_functions(self, size: int) -> tuple[Callable[[], dict[str, torch.Tensor]], ...]:
        """Return the padded stages alone."""
        return tuple(partial(stage_tensors, stage) for stage in self.padded_stages(size))


@dataclass(frozen=True, slots=True)
class _Loop:
    """A loop, its bodies (all of the first size, then of the next), and the sizes."""

    graph: LoopGraph
    bodies: Sequence[CapturedGraph]
    table: SizeTable


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
        no_loop_reason: Reason why the backend cannot loop, or an empty string.
    """

    def __init__(
        self,
        runner: StepRunner[SpecStepInputs, SpecStepOutput],
        step: SpecStep,
        ring_entries: int,
    ) -> None:
        self._lengths: DraftLengths | None = None
        if step.context.spec.is_adaptive:
            self._lengths = DraftLengths(step, runner.table.sizes, step.state.behind, runner.device)
        group = runner.group
        assert group is None or isinstance(group, RankGroup), "loops use the group's collectives"
        self._buffers, self._group, self._spec = runner.buffers, group, runner.spec
        self._table, self._largest = runner.table, runner.table.largest
        self._backend, device = runner.capturing_backend(), runner.device
        self.no_loop_reason = self._backend.no_loop_reason
        self._rows = self._buffers.live_rows("req_pool_indices", self._largest)
        self._watched = torch.zeros(self._largest, dtype=torch.bool, device=device)
        self._control = torch.zeros(len(Control), dtype=torch.int64, device=device)
        self._sizes = torch.tensor(self._table.sizes, dtype=torch.int32, device=device)
        self._ring = OutputRing(ring_entries, self._largest, step.max_path, device)
        self._reader = LoopReader(
            self._ring,
            self._poll,
            self._backend.check_device,
            counts_lengths=self._lengths is not None,
        )
        self._launch_sizes = replace(runner.sizes, max_batch_size=self._largest)
        self._prologue: StepRunner[LaunchInputs, LaunchOutput] | None = None
        self._loops: dict[bool, _Loop] = {}
        self._measured: dict[int, list[float]] = {}
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
        if self._lengths is not None:  # a single step has the longest
            drafts = self._lengths.drafts
            drafted[drafts[self._lengths.count - 1]] += stats.replays
            for length, steps in self._reader.lengths.items():
                drafted[drafts[length]] += steps
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
        self._prologue = prologue = StepRunner(
            self._begin,
            inputs=LaunchInputs,
            output=LaunchOutput,
            sizes=self._launch_sizes,
            backend=self._backend,
            batch_sizes=[self._largest],
            check=False,  # launches are validated on the host
        )
        self._launcher = LoopLauncher(prologue.buffers)
        try:
            prologue.capture()
            for is_greedy, of_lengths in steps.items():
                self._loops[is_greedy] = self._capture_loop(
                    of_lengths, prologue, self._table if table is None else table
                )
            if self._lengths is not None and table is None:
                self._measured = self._body_times()
                self._lengths.set_times(list(self._measured.values()))
        except BaseException:
            self.close()
            raise
        # The captures ran everything on pads.
        self._control.zero_()
        self._ring.clear()

    def memory_parts(self) -> dict[str, list[torch.Tensor]]:
        """Return the tensors of the loops; see ``Runner.memory_parts``."""
        parts = {} if self._prologue is None else self._prologue.memory_parts()
        owners = [self] if self._lengths is None else [self, self._lengths]
        own = [tensor for owner in owners for _, tensor in attribute_tensors(owner, 1)]
        return parts | {"static_buffers": [*parts.get("static_buffers", ()), *own]}

    def records(self) -> tuple[LoopRecord, ...]:
        """Return the composition of each loop; nothing before the capture."""
        if self._prologue is None:
            return ()
        (prologue,) = self._prologue.graphs.values()
        return tuple(
            LoopRecord(
                kind="greedy" if is_greedy else "sampled",
                prologue_nodes=loop.graph.num_nodes - sum(body.num_nodes for body in loop.bodies),
                bodies=tuple(self._body_records(loop)),
                pool_bytes=0 if index else prologue.pool_bytes,
                executable_bytes=loop.graph.executable_bytes
                + (0 if index else prologue.executable_bytes),
            )
            for index, (is_greedy, loop) in enumerate(self._loops.items())
        )

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
        if len(rows) > self._largest:
            self._table.fit(len(rows))  # raises
        if self._is_launching:  # an earlier launch raised an exception: its loop may run
            self.stop()
        self._reader.check_unread()
        if self._reader.steps_in_flight:
            self._reserve(max_steps)
        graph = self._loops[is_greedy].graph
        self._is_launching, self._running = True, graph
        # Before the launch, so that no later one has the number of one that was interrupted.
        self._launched = number = self._launched + 1
        self._launcher.launch(graph, rows, watched, max_steps, number)
        stream = self._reader.stream(number, max_steps)
        self._is_launching = False
        return stream

    def stop(self) -> None:
        """Stop all launches and wait for them. Their streams then contain all their steps."""
        self._ring.stop(self._launched)
        for loop in self._loops.values():
            loop.graph.wait()
        self._reader.end_all()
        if self._prologue is not None:  # the recorder may have discarded a launch
            self._ring.skip(int(self._control[Control.WRITTEN]))
            self._prologue.buffers.mailbox.rewind()
        self._is_launching = False

    def join(self) -> None:
        """Make later work of the current stream run after the loops."""
        if self._running is not None:
            self._running.join()

    def close(self) -> None:
        """Stop the launches, wait for them, and close all graphs. Streams remain readable."""
        self._ring.stop(self._launched)
        loops, self._loops, self._running = self._loops, {}, None
        with ExitStack() as last_first:  # closes all, even if a rank of a running loop has failed
            if self._prologue is not None:
                last_first.callback(self._prologue.close)
            last_first.callback(self._reader.end_all)  # ranks compare how many steps they ran
            for loop in loops.values():
                for body in loop.bodies:
                    last_first.callback(body.close)
                last_first.callback(loop.graph.close)

    def _capture_loop(
        self,
        steps: Sequence[LoopStep],
        prologue: StepRunner[LaunchInputs, LaunchOutput],
        table: SizeTable,
    ) -> _Loop:
        self._rows.zero_()  # captures run on pads
        with ExitStack() as failed:
            captured = []
            for index, step in enumerate(steps):
                graphs = self._capture_bodies(step, index, table)
                captured.append(graphs)
                for graph in graphs.values():
                    failed.callback(graph.close)
            bodies = [graphs[size] for size in table for graphs in captured]
            try:
                graph = self._backend.loop(
                    prologue.graphs[self._largest],
                    bodies,
                    self._condition(Control.AGAIN),
                    self._condition(Control.BODY),
                )
            except CaptureFailure as error:
                raise capture_error(ForwardMode.STEP, self._largest, error) from error
            failed.pop_all()
        return _Loop(graph, bodies, table)

    def _capture_bodies(
        self, step: LoopStep, index: int, table: SizeTable
    ) -> dict[int, CapturedGraph]:
        """Capture one of a size's bodies at all sizes."""
        length = 0 if self._lengths is None else index % self._lengths.count  # the last is plain

        def body(inputs: SpecStepInputs) -> SpecStepOutput:
            output = step(inputs)
            assert output.report is not None, "a body has rows"
            with scope("advance"):
                advance_loop(
                    output.report, self._rows, self._watched, self._control, self._sizes,
                    self._ring.words, self._ring.entries, self._signals_of_ranks(), length,
                )  # fmt: skip
                self._choose_body(output.report, length)
            return output

        mode = ForwardMode.STEP
        return SizeCapture(
            _LoopBody(
                body,
                mode,
                mode,
                self._spec,
                self._launch_sizes,
                SpecStepOutput,
                self._buffers,
                None,
            ),
            table,
            self._backend,
            {},
        ).capture()

    def _signals_of_ranks(self) -> torch.Tensor | None:
        """Return the sum of ``end_signals`` of all ranks; ``None`` for one rank."""
        if self._group is None:
            return None
        own = end_signals(self._control, self._ring.words, self._ring.entries)
        return self._group.collectives.all_reduce(own)

    def _body_records(self, loop: _Loop) -> Iterator[LoopBody]:
        all_drafts = [None] if self._lengths is None else self._lengths.drafts
        keys = product(loop.table, enumerate(all_drafts))
        for (size, (index, drafts)), body in zip(keys, loop.bodies, strict=True):
            yield LoopBody(
                batch_size=size,
                num_nodes=body.num_nodes,
                drafts=drafts,
                catches_up=self._lengths is not None and index == self._lengths.count,
                replay_us=self._measured[size][index] if size in self._measured else None,
                pool_bytes=body.pool_bytes,
                executable_bytes=body.executable_bytes,
            )

    def _choose_body(self, report: torch.Tensor | None = None, length: int = 0) -> None:
        """Count the step that ran, if any, and choose among the bodies of the next size."""
        if self._lengths is not None:
            self._lengths.choose(self._rows, self._control[Control.BODY :][:1], report, length)

    def _body_times(self) -> dict[int, list[float]]:
        """Return the mean time of greedy and sampled steps, by size, of each body."""
        loops = [loop.bodies for loop in self._loops.values()]
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

    def _begin(self, inputs: LaunchInputs) -> LaunchOutput:
        begin_loop(
            inputs.req_pool_indices, inputs.is_watched, inputs.max_steps, inputs.launch,
            self._rows, self._watched, self._control, self._sizes,
        )  # fmt: skip
        self._choose_body()
        return LaunchOutput(req_pool_indices=inputs.req_pool_indices)

    def _condition(self, word: Control) -> torch.Tensor:
        """Return the low half of a control word, int32 [1], as conditional nodes read it."""
        return self._control[word:][:1].view(torch.int32)[:1]

    def _poll(self) -> None:
        if self._running is None:
            return
        if self._group is None:
            self._running.poll()
        elif self._rows.is_cuda:  # the device goes on without the host
            self._group.require_open()
        else:
            self._group.run(self._running.poll)

    def _reserve(self, max_steps: int) -> None:
        """Refuse a launch whose first step may find the ring full of unread steps."""
        self._reader.collect()
        steps = self._reader.steps_in_flight
        if steps and steps + max_steps > self._ring.entries:
            raise ReplayError(
                f"earlier launches of {steps} steps have not been read to their end, and the ring "
                f"holds {self._ring.entries}: a launch of {max_steps} more could find it full. "
                "Read the earlier streams first, or increase ring_entries."
            )
