"""Captures of the loops over a step: a prologue, and a body per captured size and variant."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import torch

from graphkit.engine.step.loop_state import LaunchInputs, LaunchOutput, LoopLauncher, LoopState
from graphkit.engine.step.spec_step import SpecStepInputs, SpecStepOutput
from graphkit.graphs import Backend, CapturedGraph, CaptureFailure, LoopGraph, SizeTable, scope
from graphkit.ops.loop_layout import Control
from graphkit.records import LoopBody, LoopRecord
from graphkit.runners import StepRunner
from graphkit.runners.capture import SizeCapture, capture_error
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
        """Capture a loop over some steps; see ``DeviceLoops.capture``. The caller closes it.

        Raises:
            CaptureError: A size cannot be captured.
        """
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
        lengths = self._state.lengths
        length = 0 if lengths is None else index % lengths.count  # the last is a plain step

        def body(inputs: SpecStepInputs) -> SpecStepOutput:
            output = step(inputs)
            assert output.report is not None, "a body has rows"
            with scope("advance"):
                self._state.advance(output.report, length)
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
            yield LoopBody(
                batch_size=size,
                num_nodes=body.num_nodes,
                drafts=drafts,
                catches_up=lengths is not None and index == lengths.count,
                replay_us=self._times[size][index] if size in self._times else None,
                pool_bytes=body.pool_bytes,
                executable_bytes=body.executable_bytes,
            )
