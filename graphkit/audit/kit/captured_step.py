"""The whole step of a target's engine, and the properties that it must have at each size."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import torch

from graphkit.audit.audit_log import AuditLog
from graphkit.audit.kit.failures import comparison_text, fail_on_errors, frozen_value
from graphkit.audit.loop import check_loop
from graphkit.audit.runs import live_sizes
from graphkit.audit.runs.whole_step import LOOP_STEPS, compare_steps, open_step
from graphkit.graphs import Attribution
from graphkit.runners.targets import CaptureTarget

STEP_PROPERTIES = ("equivalence", "loop")
"""Names of the properties: replays are right, and a launch of many steps equals single ones."""


class CapturedStep:
    """The whole step of a target's engine, captured until it is closed.

    Args:
        target: Has an engine.
        device: ``auto``, ``cpu`` or ``cuda``.
        tolerance: Multiple of the usual rounding that is allowed, see ``Rounding``.
        batch_sizes: Sizes to capture; ``None`` selects the target's.

    Attributes:
        eager_reason: Reason why the whole step has no graph, or an empty string.

    Raises:
        CaptureError: The step cannot be captured.
        TargetError: The engine is invalid.
    """

    def __init__(
        self,
        target: CaptureTarget,
        device: str,
        tolerance: float,
        batch_sizes: Sequence[int] | None = None,
    ) -> None:
        self._tolerance = tolerance
        with ExitStack() as opened:
            opening = open_step(target, batch_sizes=batch_sizes, device=device)
            self._step = step = opened.enter_context(opening)
            self.eager_reason = ""
            if step.eager_reason:
                self.eager_reason = f"STEP is not captured: {step.eager_reason}."
            else:
                step.runner.capture(attribution=Attribution(target.weights))
            self._opened = opened.pop_all()

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """The captured sizes."""
        return () if self.eager_reason else self._step.runner.table.sizes

    def close(self) -> None:
        """Close the engine and its graphs."""
        self._opened.close()

    def check(self, name: str, size: int) -> None:
        """Check a property at a captured size.

        Raises:
            AssertionError: The property does not hold. The text says why.
            TargetError: The engine's pools have no room for the requests.
        """
        with torch.no_grad():
            if name == "equivalence":
                self._check_replays(size)
            else:
                self._check_loop(size)

    def _check_replays(self, size: int) -> None:
        runner, runs = self._step.runner, self._step.runs(size)
        runs.admit()
        try:
            for live in live_sizes(runner.table, size):
                comparison = compare_steps(runner, self._step.batch(live), size)
                if comparison.mismatches:
                    bug = frozen_value("loop", "first step and the state that differ")
                    raise AssertionError(comparison_text(comparison, bug))
        finally:
            runs.release()

    def _check_loop(self, size: int) -> None:
        log = AuditLog(self._tolerance)
        check_loop(self._step.runs(size, is_staggered=True), LOOP_STEPS, log)
        fail_on_errors(log.findings)
