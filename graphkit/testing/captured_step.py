"""The whole step of a target's engine, and the properties that it must have at each size."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import torch

from graphkit.audit.audit_log import AuditLog
from graphkit.audit.loop import check_loop
from graphkit.audit.pads import live_sizes
from graphkit.graphs import Attribution
from graphkit.step import SpecStepInputs
from graphkit.targets import CaptureTarget
from graphkit.testing.failures import comparison_text, fail_on_errors
from graphkit.verify.engine_step import (
    MOST_NEW_TOKENS,
    allocate_rows,
    open_engine,
    random_requests,
    step_refusal,
    step_runner,
)
from graphkit.verify.request_runs import RequestRuns
from graphkit.verify.step_comparison import compare_steps

STEP_PROPERTIES = ("equivalence", "loop")
"""Names of the properties: replays are right, and a launch of many steps equals single ones."""
_LOOP_STEPS = 8
_BUG = (
    "baked value. The graph kept a host value of its capture, or reads memory that was replaced "
    "since. `graphkit audit --only loop` names the first step and the state that differ."
)


class CapturedStep:
    """The whole step of a target's engine, captured until it is closed.

    Args:
        target: Has an engine.
        device: ``auto``, ``cpu`` or ``cuda``.
        tolerance: Multiple of the usual rounding that is allowed, see ``verify.Rounding``.
        batch_sizes: Sizes to capture; ``None`` selects the target's.

    Attributes:
        eager_reason: Why there is no graph of the whole step, as a sentence; empty if there is.

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
            engine = open_engine(target, batch_sizes=batch_sizes, device=device)
            self._engine = opened.enter_context(engine)
            self._runner = step_runner(self._engine)
            self.eager_reason = ""
            if self._runner is None:
                self.eager_reason = f"STEP is not captured: {step_refusal(self._engine)}."
            else:
                self._runner.capture(attribution=Attribution(target.weights))
                self._rows = allocate_rows(target, self._engine)
            self._opened = opened.pop_all()

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """The captured sizes."""
        return () if self._runner is None else self._runner.table.sizes

    def close(self) -> None:
        """Close the engine and its graphs."""
        self._opened.close()

    def check(self, name: str, size: int) -> None:
        """Check a property at a captured size.

        Raises:
            AssertionError: The property does not hold. The text says why.
        """
        with torch.no_grad():
            if name == "equivalence":
                self._check_replays(size)
            else:
                self._check_loop(size)

    def _check_replays(self, size: int) -> None:
        runner = self._runner
        assert runner is not None, "the step is captured"
        smaller = max((each for each in self.batch_sizes if each < size), default=0)
        runs = RequestRuns(
            runner, random_requests(self._engine, self._rows[:size], lambda _index: MOST_NEW_TOKENS)
        )
        runs.admit()
        try:
            for live in live_sizes(size, smaller):
                batch = SpecStepInputs(req_pool_indices=torch.tensor(self._rows[:live]))
                comparison = compare_steps(runner, batch, size)
                if comparison.mismatches:
                    raise AssertionError(comparison_text(comparison, _BUG))
        finally:
            runs.release()

    def _check_loop(self, size: int) -> None:
        assert self._runner is not None, "the step is captured"
        log = AuditLog(self._tolerance)
        # The requests end after different steps, so that the loop changes its size.
        requests = random_requests(
            self._engine, self._rows[:size], lambda index: 2 + 5 * index % 23
        )
        check_loop(self._runner, requests, _LOOP_STEPS, log)
        fail_on_errors(log.findings)
