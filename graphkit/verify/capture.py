"""Capture of a target, and the check of every replay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from graphkit.graphs import Attribution, Backend
from graphkit.records import CaptureRecord, ModeRecord, SizeRecord
from graphkit.runners import Runner
from graphkit.spec import ForwardMode
from graphkit.targets import CaptureTarget, selected_modes
from graphkit.verify.size_check import SizeCheck

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

    Args:
        target: What to capture.
        modes: Modes to capture; ``None`` takes all that the target has.
        batch_sizes: Sizes to capture; ``None`` takes the target's.
        device: ``auto``, ``cpu`` or ``cuda``.
        backend: As for ``Runner``.
        inspect: Whether to inspect every graph and measure its nodes: the record's ``graphs``.
        progress: Called with the number of steps done, the total, and a text for the step.

    Returns:
        The record; its ``mismatches`` are empty if every replay was right. A mode whose attention
        backend has no graphs for it is in the record without sizes: nothing is replayed there.

    Raises:
        CaptureError: A forward cannot be captured.
        TargetError: ``target`` is no target, or lacks a mode.
    """
    chosen = selected_modes(target, modes)
    attribution = Attribution(target.weights) if inspect else None
    with ExitStack() as runners:
        records, checks = [], list[SizeCheck]()
        for mode in chosen:
            runner = runners.enter_context(
                target.runner(mode, batch_sizes=batch_sizes, device=device, backend=backend)
            )
            record, of_mode = _capture_mode(target, runner, attribution, progress)
            records.append(record)
            checks += of_mode
        # Last, since a profiler that was on once makes every later launch slower.
        graphs = tuple(check.inspected() for check in checks) if inspect else ()
    return replace(
        records[0],
        target=target.name,
        modes=tuple(mode for record in records for mode in record.modes),
        mismatches=tuple(mismatch for check in checks for mismatch in check.mismatches),
        graphs=graphs,
    )


def _capture_mode(
    target: CaptureTarget,
    runner: Runner[Any, Any],
    attribution: Attribution | None,
    progress: Progress,
) -> tuple[CaptureRecord, list[SizeCheck]]:
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
        check = SizeCheck(target, runner, size.batch_size)
        for live in range(1, size.batch_size + 1):
            check.compare(live)
            step(f"comparing {live} at {size.batch_size}")
        measured.append(check.measured(size))
        checks.append(check)
    if not checks:
        progress(total, total, f"{runner.mode.name} stays eager")
    mode: ModeRecord = replace(record.modes[0], sizes=tuple(measured), stats=runner.stats)
    return replace(record, modes=(mode,)), checks
