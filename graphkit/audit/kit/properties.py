"""Properties that a captured mode must have at each captured size."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from functools import partial

from graphkit.audit.audit_log import AuditLog
from graphkit.audit.kit.equivalence import (
    STEP_PROPERTIES,
    assert_replay_equivalent,
    check_step,
    sample_batches,
)
from graphkit.audit.kit.failures import fail_on_errors
from graphkit.audit.report import AFTER_CAPTURE, BEFORE_CAPTURE
from graphkit.audit.runs.engine_step import open_step
from graphkit.audit.undeclared_state import declare_for_audits
from graphkit.errors import GraphkitError
from graphkit.graphs import Attribution
from graphkit.records import Finding
from graphkit.records.audit import Audit
from graphkit.runners.targets import CaptureTarget
from graphkit.spec import ForwardMode

_AUDITS = {**BEFORE_CAPTURE, **AFTER_CAPTURE}

PROPERTIES = ("equivalence", *_AUDITS)
"""Names of the properties: replays are right, and each audit finds no error."""


def properties_of(target: CaptureTarget, mode: ForwardMode) -> Sequence[str]:
    """Return the names of the properties of a mode; STEP may be the step of the engine."""
    return PROPERTIES if mode in target.forwards else STEP_PROPERTIES


class CapturedMode:
    """A mode of a target, or the step of its engine, captured until it is closed.

    Args:
        target: The target.
        mode: One of its modes.
        device: ``auto``, ``cpu`` or ``cuda``.
        tolerance: Multiple of the usual rounding that is allowed, see ``Rounding``.
        wanted: Properties that will be checked; some audits run before the capture.

    Attributes:
        eager_reason: Reason why there are no graphs, or an empty string.

    Raises:
        CaptureError: The forward cannot be captured.
        TargetError: The engine is invalid.
    """

    def __init__(
        self,
        target: CaptureTarget,
        mode: ForwardMode,
        device: str,
        tolerance: float,
        wanted: Collection[str],
    ) -> None:
        self._target, self._tolerance = target, tolerance
        self._audited: dict[str, Callable[[], Collection[Finding]]] = {}
        with ExitStack() as opened:
            if mode in target.forwards:
                self._runner = opened.enter_context(target.runner(mode, device=device))
                self.eager_reason = self._runner.eager_reason
                self._check = self._check_forward
                self._capture(wanted)
            else:
                step = opened.enter_context(open_step(target, device=device))
                reason = step.eager_reason
                self.eager_reason = f"STEP is not captured: {reason}." if reason else ""
                self._check = partial(check_step, step, tolerance=tolerance)
                step.capture()
            self._opened = opened.pop_all()

    def close(self) -> None:
        """Close the graphs."""
        self._opened.close()

    def check(self, name: str, size: int) -> None:
        """Check a property at a size.

        Raises:
            AssertionError: The property does not hold. The text says why.
            GraphkitError: The audit of the property failed.
        """
        self._check(name, size)

    def _capture(self, wanted: Collection[str]) -> None:
        """Capture the forward, and audit before it what must be audited before."""
        for name in () if self.eager_reason else BEFORE_CAPTURE:
            if name in wanted:
                self._audit(name)
        self._runner.capture(attribution=Attribution(self._target.weights))
        if not self.eager_reason:
            declare_for_audits(self._target, self._runner, AuditLog())

    def _check_forward(self, name: str, size: int) -> None:
        if name == "equivalence":
            batches = sample_batches(self._target, self._runner, size)
            assert_replay_equivalent(
                self._runner, batches, tolerance=self._tolerance, padded_batch_size=size
            )
            return
        if name not in self._audited:
            self._audit(name)
        findings = [finding for finding in self._audited[name]() if finding.batch_size in (0, size)]
        fail_on_errors(findings)

    def _audit(self, name: str) -> None:
        """Run an audit of all sizes once. Its error is raised by the checks of its property."""
        log = AuditLog(self._tolerance)
        try:
            _AUDITS[Audit(name)](self._target, self._runner, log)
        except GraphkitError as error:
            self._audited[name] = _raising(error)
        else:
            self._audited[name] = lambda: log.findings


def _raising(error: GraphkitError) -> Callable[[], Collection[Finding]]:
    def fail() -> Collection[Finding]:
        raise error

    return fail
