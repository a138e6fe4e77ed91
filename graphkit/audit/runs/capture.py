"""Capture of a target, and the check of every replay."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache, partial
from statistics import median
from typing import Any

from graphkit.audit.runs.engine_step import EngineStep, compare_loop, compare_steps, open_step
from graphkit.audit.runs.equal_state_runs import Comparison, compare_runs, live_sizes
from graphkit.engine.step import SpecStepInputs
from graphkit.graphs import Attribution, Backend, StateSnapshot, backend_for, environment
from graphkit.models.wrapper import WRAPPED_MODES, compare_wrapper
from graphkit.records import (
    CaptureRecord,
    GraphRecord,
    MemoryEstimate,
    Mismatch,
    ModeRecord,
    SizeRecord,
)
from graphkit.runners import Runner
from graphkit.runners.comparison.step_comparison import SEED, restorable_state
from graphkit.runners.memory_estimate import estimate_memory
from graphkit.runners.targets import CaptureTarget, selected_modes
from graphkit.spec import ForwardMode

Progress = Callable[[int, int, str], None]
_REPEATS, _EAGER_REPEATS = {"cuda": 20, "cpu": 3}, {"cuda": 5, "cpu": 3}
"""Replays and runs without a graph of which the median is taken. The latter take the host tens of
milliseconds, which vary less."""


def capture_target(
    target: CaptureTarget,
    *,
    modes: Sequence[ForwardMode] | None = None,
    batch_sizes: Sequence[int] | None = None,
    device: str = "auto",
    backend: Backend | None = None,
    inspect: bool = False,
    compares_all: bool = True,
    progress: Progress = lambda _done, _total, _what: None,
) -> CaptureRecord:
    """Capture every mode and size, and check each size with every live batch size that it holds.

    A replay of STEP, if that is the whole step of ``target.engine``, is compared with the same step
    without its graph, in its report and in the state of the requests; and a launch of several steps
    with replays of single steps. If the target declares its ``model``, TARGET_VERIFY and DECODE are
    compared with it, as ``testing.check_wrapper`` does.

    Args:
        target: What to capture.
        modes: Modes to capture; ``None`` selects all that the target has.
        batch_sizes: Sizes to capture; ``None`` selects the target's.
        device: ``auto``, ``cpu`` or ``cuda``.
        backend: As for ``Runner``.
        inspect: Whether to inspect every graph and measure its nodes: the record's ``graphs``.
        compares_all: Whether to check each size with all live batch sizes that it holds, or with
            those of ``live_sizes``.
        progress: Called with the number of steps done, the total, and a text for the step.

    Returns:
        The record; its ``mismatches`` are empty if every replay was right, and its ``wrapper`` has
        no difference if the forward computes what the model does. A mode whose attention
        backend has no graphs for it is in the record without sizes: nothing is replayed there.

    Raises:
        CaptureError: A forward cannot be captured.
        TargetError: ``target`` is not a target, lacks a mode, or has an invalid engine.
    """
    chosen = selected_modes(target, modes)
    used = backend_for(device, backend)
    attribution = Attribution(target.weights) if inspect else None
    settings: dict[str, Any] = {"batch_sizes": batch_sizes, "device": device, "backend": backend}
    records: list[ModeRecord] = []
    captures: list[_ModeCapture] = []
    with ExitStack() as stack:
        for mode in chosen:
            if mode in target.forwards:
                runner = stack.enter_context(target.runner(mode, **settings))
                draw = partial(_sample_batch, target, mode)
                compared = runner, draw, compare_runs, compares_all
                captured = _ModeCapture(*compared, attribution, progress)
            else:
                step = stack.enter_context(open_step(target, **settings))
                if step.eager_reason:
                    eager = ModeRecord(
                        mode=mode.name,
                        tokens_per_request=1,
                        host_planned=False,
                        input_bytes=0,
                        sizes=(),
                        eager_reason=step.eager_reason,
                    )
                    records.append(eager)
                    continue
                captured = _capture_step(step, compares_all, attribution, progress)
            captures.append(captured)
            records.append(captured.record)
        wrapper = None
        if target.model is not None and any(mode in WRAPPED_MODES for mode in chosen):
            wrapper = compare_wrapper(target, target.model, device=device)
        # Last, since a profiler that was on once makes every later launch slower.
        graphs = [g for capture in captures if inspect for g in capture.inspected(target.weights)]
    return CaptureRecord(
        target=target.name,
        backend=used.name,
        environment=environment(used.device),
        modes=tuple(records),
        mismatches=tuple(mismatch for capture in captures for mismatch in capture.mismatches),
        graphs=tuple(graphs),
        wrapper=wrapper,
    )


def estimate_target(
    target: CaptureTarget,
    *,
    modes: Sequence[ForwardMode] | None = None,
    batch_sizes: Sequence[int] | None = None,
    device: str = "auto",
    backend: Backend | None = None,
) -> MemoryEstimate:
    """Return the device memory that the graphs of a target and its buffers take.

    Predicts it from captures of a few sizes, which are closed again; see ``Runner.estimate``. STEP
    is left out if the target's engine does not capture whole steps.

    Args:
        target: What would be captured.
        modes: As for ``capture_target``.
        batch_sizes: As for ``capture_target``.
        device: ``auto``, ``cpu`` or ``cuda``.
        backend: As for ``Runner``.

    Raises:
        CaptureError: A forward cannot be captured.
        TargetError: As for ``capture_target``.
    """
    chosen = selected_modes(target, modes)
    settings: dict[str, Any] = {"batch_sizes": batch_sizes, "device": device, "backend": backend}
    with ExitStack() as stack:
        runners: list[Runner[Any, Any]] = []
        for mode in chosen:
            if mode in target.forwards:
                runners.append(stack.enter_context(target.runner(mode, **settings)))
                continue
            step = stack.enter_context(open_step(target, **settings))
            if not step.eager_reason:
                runners.append(step.runner)
        return estimate_memory(backend_for(device, backend), runners)


def _sample_batch(target: CaptureTarget, mode: ForwardMode, batch_size: int) -> Any:
    return target.batch(mode, batch_size, SEED + batch_size)


class _ModeCapture:
    """Captures a mode, and compares and measures replays at each captured size.

    ``draw`` returns a batch of a number of requests, and ``compare`` compares its replay at a
    captured size with the step without a graph.

    Attributes:
        record: The mode, with the outcome of the comparisons and the duration of full batches.
        mismatches: Wrong replays.
    """

    def __init__(
        self,
        runner: Runner[Any, Any],
        draw: Callable[[int], Any],
        compare: Callable[[Any, Any, int], Comparison],
        compares_all: bool,
        attribution: Attribution | None,
        progress: Progress,
    ) -> None:
        self._runner, self._draw, self._compare = runner, draw, compare
        self._progress, self.mismatches = progress, list[Mismatch]()
        sizes = runner.table.sizes
        self._live_sizes = {
            size: range(1, size + 1) if compares_all else live_sizes(runner.table, size)
            for size in sizes
        }
        self._total, self._done = len(sizes) + sum(map(len, self._live_sizes.values())), 0
        progress(0, self._total, f"{runner.mode.name} capturing {sizes[-1]}")
        record = runner.capture(
            lambda size: self._advance(f"captured {size.batch_size}"), attribution=attribution
        )
        checked = tuple(self._checked(size) for size in record.modes[0].sizes)
        if not checked:
            progress(self._total, self._total, f"{runner.mode.name} stays eager")
        self.record: ModeRecord = replace(record.modes[0], sizes=checked, stats=runner.stats)

    def inspected(self, weights: Any) -> Iterator[GraphRecord]:
        """Yield the record of each graph, with the cost of its nodes for a full batch."""
        for size in (size.batch_size for size in self.record.sizes):
            replay = partial(self._runner.replay, self._draw(size), padded_batch_size=size)
            with StateSnapshot(restorable_state(self._runner), self._runner.device):
                yield self._runner.inspect(size, weights=weights, replay=replay)

    def _advance(self, what: str) -> None:
        self._done += 1
        self._progress(self._done, self._total, f"{self._runner.mode.name} {what}")

    def _checked(self, record: SizeRecord) -> SizeRecord:
        """Compare replays of the live batch sizes, and measure a full batch."""
        size, largest = record.batch_size, 0.0
        for live in self._live_sizes[size]:
            comparison = self._compare(self._runner, self._draw(live), size)
            largest = max(largest, comparison.largest_difference)
            self.mismatches += comparison.mismatches
            self._advance(f"comparing {live} at {size}")
        batch = self._draw(size)
        return replace(
            record,
            replay_us=duration_us(self._runner, partial(self._runner.replay, batch)),
            eager_us=duration_us(
                self._runner, partial(self._runner.fall_back, batch), _EAGER_REPEATS
            ),
            largest_difference=largest,
            batches_compared=len(self._live_sizes[size]),
        )


def duration_us(
    runner: Runner[Any, Any], run: Callable[[], object], repeats: Mapping[str, int] = _REPEATS
) -> float:
    """Return the median time in microseconds until the results of running a batch are available.

    Restores state and random numbers. ``repeats`` is the number of runs by type of device.
    """

    def once() -> float:
        runner.backend.wait_for_device()
        began = time.perf_counter()
        run()
        runner.backend.wait_for_device()
        return (time.perf_counter() - began) * 1e6

    with StateSnapshot(restorable_state(runner), runner.device):
        return median(once() for _ in range(repeats[runner.device.type]))


def _capture_step(
    step: EngineStep, compares_all: bool, attribution: Attribution | None, progress: Progress
) -> _ModeCapture:
    """Capture the whole step of an engine, and check its sizes and its loops."""
    runner, requests = step.runner, step.runs()
    admit = cache(requests.admit)

    def draw(live: int) -> SpecStepInputs:
        admit()  # after the capture: its graphs run the prompts
        return step.batch(live)

    compared = runner, draw, compare_steps, compares_all
    captured, loops = _ModeCapture(*compared, attribution, progress), []
    for loop in captured.record.loops:
        progress(0, 1, f"{runner.mode.name} comparing the {loop.kind} loop")
        runs = step.runs(is_staggered=True, is_greedy=loop.kind == "greedy")
        steps, mismatches = compare_loop(runs)
        loops.append(replace(loop, steps_compared=steps))
        captured.mismatches += mismatches
    if attribution is not None:  # the graphs are inspected
        requests.admit()
    captured.record = replace(captured.record, loops=tuple(loops), stats=runner.stats)
    return captured
