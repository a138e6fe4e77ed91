"""Properties that the captured step of a target's engine must have at each size."""

from __future__ import annotations

import torch

from graphkit.audit.audit_log import AuditLog
from graphkit.audit.kit.failures import comparison_text, fail_on_errors, frozen_value
from graphkit.audit.loop import check_loop
from graphkit.audit.runs import live_sizes
from graphkit.audit.runs.engine_step import LOOP_STEPS, EngineStep, compare_steps

STEP_PROPERTIES = ("equivalence", "loop")
"""Names of the properties: replays are right, and a launch of many steps equals single ones."""


@torch.no_grad()
def check_step(step: EngineStep, name: str, size: int, tolerance: float) -> None:
    """Check a property at a captured size.

    Args:
        step: The step, captured.
        name: One of ``STEP_PROPERTIES``.
        size: The size.
        tolerance: Multiple of the usual rounding that is allowed, see ``Rounding``.

    Raises:
        AssertionError: The property does not hold. The text says why.
        TargetError: The engine's pools have no room for the requests.
    """
    if name == "loop":
        log = AuditLog(tolerance)
        check_loop(step.runs(size, is_staggered=True), LOOP_STEPS, log)
        fail_on_errors(log.findings)
        return
    runner, runs = step.runner, step.runs(size)
    runs.admit()
    try:
        for live in live_sizes(runner.table, size):
            comparison = compare_steps(runner, step.batch(live), size)
            if comparison.mismatches:
                bug = frozen_value("loop", "first step and the state that differ")
                raise AssertionError(comparison_text(comparison, bug))
    finally:
        runs.release()
