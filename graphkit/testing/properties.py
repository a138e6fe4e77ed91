"""What a captured mode must be at each of its sizes: properties by name."""

from __future__ import annotations

from collections.abc import Callable, Collection

from graphkit.audit.audit_log import AuditLog
from graphkit.audit.report import AFTER_CAPTURE, BEFORE_CAPTURE
from graphkit.errors import GraphkitError
from graphkit.graphs import Attribution
from graphkit.records import Finding
from graphkit.spec import ForwardMode
from graphkit.targets import CaptureTarget
from graphkit.testing.equivalence import assert_replay_equivalent, sample_batches

_AUDITS = {**BEFORE_CAPTURE, **AFTER_CAPTURE}

PROPERTIES = ("equivalence", *_AUDITS)
"""Their names: replays are right, and no audit finds anything."""


class CapturedMode:
    """A mode of a target, captured until it is closed.

    Args:
        target: The target.
        mode: One of its modes.
        device: ``auto``, ``cpu`` or ``cuda``.
        wanted: Properties that will be asked for; some must be looked at before the capture.

    Attributes:
        eager_reason: Why there are no graphs; empty if there are.

    Raises:
        CaptureError: The forward cannot be captured.
    """

    def __init__(
        self, target: CaptureTarget, mode: ForwardMode, device: str, wanted: Collection[str]
    ) -> None:
        self._target = target
        self._runner = target.runner(mode, device=device)
        self._audited: dict[str, Callable[[], Collection[Finding]]] = {}
        self.eager_reason = self._runner.eager_reason
        for name in () if self.eager_reason else BEFORE_CAPTURE:
            if name in wanted:
                self._audit(name)
        self._runner.capture(attribution=Attribution(target.weights))

    def close(self) -> None:
        """Give the graphs back."""
        self._runner.close()

    def check(self, name: str, size: int) -> None:
        """Fail unless a property holds at a size.

        Raises:
            AssertionError: It does not; the text says what is wrong.
            GraphkitError: It cannot be looked at.
        """
        if name == "equivalence":
            batches = sample_batches(self._target, self._runner, size)
            assert_replay_equivalent(self._runner, batches, padded_batch_size=size)
            return
        if name not in self._audited:
            self._audit(name)
        found = [each for each in self._audited[name]() if each.batch_size in (0, size)]
        if any(each.severity == "error" for each in found):
            raise AssertionError("\n\n".join(map(_text, found)))

    def _audit(self, name: str) -> None:
        """Run an audit of all sizes, once; what it raises is for those who ask for it."""
        log = AuditLog()
        try:
            _AUDITS[name](self._target, self._runner, log)
        except GraphkitError as error:
            self._audited[name] = _raising(error)
        else:
            self._audited[name] = lambda: log.findings


def _raising(error: GraphkitError) -> Callable[[], Collection[Finding]]:
    def fail() -> Collection[Finding]:
        raise error

    return fail


def _text(finding: Finding) -> str:
    place = f"{finding.mode} {finding.batch_size or ''}".rstrip()
    lines = [f"{finding.kind}: {place}: {finding.text}"]
    if finding.before or finding.after:
        lines += [f"  expected: {finding.before}", f"  got: {finding.after}"]
    lines += [f"  at: {where}" for where in (finding.module, finding.source) if where]
    return "\n".join([*lines, f"  {finding.advice}"])
