"""The audit of the whole step of a target's engine."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

from graphkit.audit.audit_log import AuditLog
from graphkit.audit.loop import check_loop
from graphkit.audit.ranks import NOT_ON_RANKS
from graphkit.graphs import Attribution
from graphkit.spec import ForwardMode
from graphkit.step import SpecStepRunner
from graphkit.targets import CaptureTarget
from graphkit.verify.engine_step import (
    allocate_rows,
    open_engine,
    random_requests,
    step_refusal,
    step_runner,
)

_STEPS = 8
_OF_FORWARDS = (
    "not run: STEP is the whole step of the engine; its forwards are audited in their own modes"
)


@contextmanager
def audited_step(
    target: CaptureTarget,
    log: AuditLog,
    chosen: Collection[str],
    *,
    batch_sizes: Sequence[int],
    device: str,
    needs_graphs: bool,
) -> Iterator[SpecStepRunner | None]:
    """Audit the whole step of a target's engine, and yield its runner, captured.

    The audit ``loop`` compares launches of several steps with the same steps without a graph. All
    others work on single forwards, and log that they were not run.

    Args:
        target: Has an engine.
        log: Collects checks and findings.
        chosen: Names of audits.
        batch_sizes: Sizes to capture.
        device: ``auto``, ``cpu`` or ``cuda``.
        needs_graphs: Whether to capture the step even if no audit runs.

    Yields:
        ``None`` if nothing was captured.

    Raises:
        CaptureError: The step cannot be captured.
        TargetError: The engine is invalid.
    """
    mode = ForwardMode.STEP.name
    for name in chosen:
        if name != "loop":
            with log.check(name, mode) as check:
                check.text = _OF_FORWARDS
    if target.group is not None and "loop" in chosen:
        with log.check("loop", mode) as check:
            check.text = f"not run: {NOT_ON_RANKS['loop']}"
        chosen = ()
    if not needs_graphs and "loop" not in chosen:
        yield None
        return
    with open_engine(target, batch_sizes=batch_sizes, device=device) as engine:
        runner = step_runner(engine)
        if runner is None:
            with log.check("loop", mode) as check:
                check.text = f"not run: {step_refusal(engine)}"
        else:
            runner.capture(attribution=Attribution(target.weights))
            if "loop" in chosen:
                rows = allocate_rows(target, engine)
                requests = random_requests(engine, rows, lambda index: 2 + 5 * index % 23)
                check_loop(runner, requests, _STEPS, log)
        yield runner
