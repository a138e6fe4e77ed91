"""Capture of a target, and the check of every replay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from graphkit.audit.runs.comparison import Comparison, compare_runs
from graphkit.audit.runs.engine_step import EngineStep, compare_loop, compare_steps, open_step
from graphkit.audit.runs.size_check import SizeCheck
from graphkit.graphs import Attribution, Backend, backend_for, environment
from graphkit.models.wrapper import WRAPPED_MODES, compare_wrapper
from graphkit.records import CaptureRecord, MemoryEstimate, Mismatch, ModeRecord, SizeRecord
from graphkit.runners import Runner
from graphkit.runners.comparison.step_comparison import SEED
from graphkit.runners.memory_estimate import estimate_memory
from graphkit.runners.targets import CaptureTarget, selected_modes
from graphkit.spec import ForwardMode

Progress = Callable[[int, int, str], None]


def capture_target(
    target: CaptureTarget,
    *,
    modes: Sequence[ForwardMode] | None = None,
    batch_sizes: Sequence[int] | None = None,
    device: str = "auto",
    backend: Backend | None = None,
    inspect: bool = False,
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
    with ExitStack() as stack:
        captured = []
        for mode in chosen:
            if mode in target.forwards:
                runner = stack.enter_context(target.runner(mode, **settings))
                draw = partial(_sample_batch, target, mode)
                captured.append(_captured(runner, draw, compare_runs, attribution, progress))
            else:
                step = stack.enter_context(open_step(target, **settings))
                captured.append(_captured_step(step, attribution, progress))
        checks = [check for mode in captured for check in mode.checks]
        wrapper = None
        if target.model is not None and any(mode in WRAPPED_MODES for mode in chosen):
            wrapper = compare_wrapper(target, target.model, device=device)
        # Last, since a profiler that was on once makes every later launch slower.
        graphs = tuple(check.inspected(target.weights) for check in checks) if inspect else ()
    return CaptureRecord(
        target=target.name,
        backend=used.name,
        environment=environment(used.device),
        modes=tuple(mode.mode for mode in captured),
        mismatches=tuple(mismatch for mode in captured for mismatch in mode.mismatches),
        graphs=graphs,
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


@dataclass(frozen=True, slots=True)
class _CheckedMode:
    """The record of a mode, the checks of its sizes, and what they found."""

    mode: ModeRecord
    checks: Sequence[SizeCheck]
    mismatches: Sequence[Mismatch]


def _sample_batch(target: CaptureTarget, mode: ForwardMode, batch_size: int) -> Any:
    return target.batch(mode, batch_size, SEED + batch_size)


def _captured(
    runner: Runner[Any, Any],
    draw: Callable[[int], Any],
    compare: Callable[[Any, Any, int], Comparison],
    attribution: Attribution | None,
    progress: Progress,
) -> _CheckedMode:
    """Capture a runner and check its sizes; arguments as for ``SizeCheck``."""
    sizes = runner.table.sizes
    total, done = len(sizes) + sum(sizes), 0

    def step(what: str) -> None:
        nonlocal done
        done += 1
        progress(done, total, f"{runner.mode.name} {what}")

    progress(0, total, f"{runner.mode.name} capturing {sizes[-1]}")
    record = runner.capture(
        lambda size: step(f"captured {size.batch_size}"), attribution=attribution
    )
    measured: list[SizeRecord] = []
    checks: list[SizeCheck] = []
    for size in record.modes[0].sizes:
        check = SizeCheck(runner, size.batch_size, draw, compare)
        for live in range(1, size.batch_size + 1):
            check.compare(live)
            step(f"comparing {live} at {size.batch_size}")
        measured.append(check.measured(size))
        checks.append(check)
    if not checks:
        progress(total, total, f"{runner.mode.name} stays eager")
    mode: ModeRecord = replace(record.modes[0], sizes=tuple(measured), stats=runner.stats)
    return _CheckedMode(
        mode, checks, [mismatch for check in checks for mismatch in check.mismatches]
    )


def _captured_step(
    step: EngineStep, attribution: Attribution | None, progress: Progress
) -> _CheckedMode:
    """Capture the whole step of an engine, and check its sizes and its loops."""
    if step.eager_reason:
        return _CheckedMode(_eager_step(step.eager_reason), (), ())
    runner, requests = step.runner, step.runs()
    requests.admit()
    captured = _captured(runner, step.batch, compare_steps, attribution, progress)
    loops, mismatches = [], [*captured.mismatches]
    for loop in captured.mode.loops:
        progress(0, 1, f"{runner.mode.name} comparing the {loop.kind} loop")
        runs = step.runs(is_staggered=True, is_greedy=loop.kind == "greedy")
        steps, mismatch = compare_loop(runs)
        loops.append(replace(loop, steps_compared=steps))
        mismatches += [] if mismatch is None else [mismatch]
    requests.admit()  # for the inspection of the graphs
    mode = replace(captured.mode, loops=tuple(loops), stats=runner.stats)
    return replace(captured, mode=mode, mismatches=mismatches)


def _eager_step(reason: str) -> ModeRecord:
    return ModeRecord(
        mode=ForwardMode.STEP.name,
        tokens_per_request=1,
        host_planned=False,
        input_bytes=0,
        sizes=(),
        eager_reason=reason,
    )
