"""Collection of ``pytest --graphkit``: a target, its modes, and a test per size and property.

A mode is captured before its first test and closed after its last.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import pytest

from graphkit.audit.audit_log import AuditLog
from graphkit.audit.kit.equivalence import (
    STEP_PROPERTIES,
    assert_replay_equivalent,
    check_step,
    fail_on_errors,
    sample_batches,
)
from graphkit.audit.locate_target import locate
from graphkit.audit.report import AFTER_CAPTURE, BEFORE_CAPTURE
from graphkit.audit.runs.engine_step import EngineStep, open_step
from graphkit.audit.undeclared_state import declare_for_audits
from graphkit.errors import GraphkitError
from graphkit.graphs import Attribution, SizeTable, resolve_device
from graphkit.models.wrapper.comparison import check_wrapper
from graphkit.records import Finding
from graphkit.records.audit import Audit
from graphkit.runners import Runner
from graphkit.runners.comparison import check_tolerance
from graphkit.runners.targets import CaptureTarget
from graphkit.spec import ForwardMode

_AUDITS = {**BEFORE_CAPTURE, **AFTER_CAPTURE}

PROPERTIES = ("equivalence", *_AUDITS)
"""Names of the properties: replays are right, and each audit finds no error."""


class TargetCollector(pytest.Collector):
    """Collects a target. The collector's name is the TARGET of the command line."""

    def collect(self) -> Iterator[pytest.Collector | pytest.Item]:
        """Yield the modes, and a test against the model if the target declares one."""
        try:
            check_tolerance(self.config.option.graphkit_tolerance)
            device = str(resolve_device(self.config.option.graphkit_device))
            target = locate(self.name, device)
        except GraphkitError as error:
            raise self.CollectError(str(error)) from error
        for mode in target.modes:
            yield ModeCollector.from_parent(
                self, name=mode.name, target=target, mode=mode, device=device
            )
        if target.model is not None:
            yield WrapperItem.from_parent(self, name="wrapper", target=target, device=device)


class ModeCollector(pytest.Collector):
    """Collects the tests of a mode, or of the step of the engine, and captures it for them."""

    def __init__(
        self, *, target: CaptureTarget, mode: ForwardMode, device: str, **facts: Any
    ) -> None:
        super().__init__(**facts)
        self._target, self._mode, self._device = target, mode, device
        self._tolerance: float = self.config.option.graphkit_tolerance
        self._properties = PROPERTIES if mode in target.forwards else STEP_PROPERTIES
        self._opened = ExitStack()
        self._audited: dict[str, Sequence[Finding] | GraphkitError] = {}
        self._runner: Runner[Any, Any] | None = None
        self._step: EngineStep | None = None

    def collect(self) -> Iterator[pytest.Item]:
        """Yield a test per property and size."""
        table = SizeTable(self._target.sizes.max_batch_size, self._target.batch_sizes)
        for size in table:
            for name in self._properties:
                yield PropertyItem.from_parent(self, name=f"{name}[{size}]", of=name, size=size)

    def setup(self) -> None:
        """Capture the mode, and audit before it what must be audited before."""
        if self._mode not in self._target.forwards:
            opened = open_step(self._target, device=self._device)
            self._step = self._opened.enter_context(opened)
            self._step.capture()
            if self._step.eager_reason:
                pytest.skip(f"STEP is not captured: {self._step.eager_reason}.")
            return
        # Audits feed NaN and stale rows on purpose, which the checking mode refuses.
        planned = self._target.runner(self._mode, device=self._device, check=False)
        self._runner = runner = self._opened.enter_context(planned)
        items = (item for item in self.session.items if isinstance(item, PropertyItem))
        wanted = {item.of for item in items if item.parent is self}
        for name in () if runner.eager_reason else BEFORE_CAPTURE:
            if name in wanted:
                self._audit(name, runner)
        runner.capture(attribution=Attribution(self._target.weights))
        if runner.eager_reason:
            pytest.skip(runner.eager_reason)
        declare_for_audits(self._target, runner, AuditLog())

    def teardown(self) -> None:
        """Close the graphs."""
        self._opened.close()

    def check(self, name: str, size: int) -> None:
        """Check a property at a captured size.

        Raises:
            AssertionError: The property does not hold. The text says why.
            GraphkitError: The audit of the property failed.
        """
        if self._step is not None:
            check_step(self._step, name, size, self._tolerance)
            return
        assert self._runner is not None, "the mode was captured"
        if name == "equivalence":
            batches = sample_batches(self._target, self._runner, size)
            assert_replay_equivalent(
                self._runner, batches, tolerance=self._tolerance, padded_batch_size=size
            )
            return
        if name not in self._audited:
            self._audit(name, self._runner)
        outcome = self._audited[name]
        if isinstance(outcome, GraphkitError):
            raise outcome
        fail_on_errors(finding for finding in outcome if finding.batch_size in (0, size))

    def _audit(self, name: str, runner: Runner[Any, Any]) -> None:
        """Run an audit of all sizes once. Its error is raised by the checks of its property."""
        log = AuditLog(self._tolerance)
        try:
            _AUDITS[Audit(name)](self._target, runner, log)
        except GraphkitError as error:
            self._audited[name] = error
        else:
            self._audited[name] = log.findings


class _TargetItem(pytest.Item):
    """A test of a target; its failures are texts."""

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], *rest: Any) -> Any:
        """Return the text of a failed check alone: its traceback shows only graphkit's code."""
        if isinstance(excinfo.value, (AssertionError, GraphkitError)):
            return str(excinfo.value)
        return super().repr_failure(excinfo, *rest)

    def reportinfo(self) -> tuple[os.PathLike[str] | str, int | None, str]:
        """Return the heading of a failure."""
        return self.path, None, self.nodeid.replace("::", " ")


class PropertyItem(_TargetItem):
    """Test of one property at one captured size.

    Attributes:
        of: Name of the property.
    """

    parent: ModeCollector

    def __init__(self, *, of: str, size: int, **facts: Any) -> None:
        super().__init__(**facts)
        self.of, self._size = of, size

    def runtest(self) -> None:
        """Check the property."""
        self.parent.check(self.of, self._size)


class WrapperItem(_TargetItem):
    """Comparison of a target with its model."""

    def __init__(self, *, target: CaptureTarget, device: str, **facts: Any) -> None:
        super().__init__(**facts)
        self._target, self._device = target, device

    def runtest(self) -> None:
        """Compare the target with its model."""
        tolerance = self.config.option.graphkit_tolerance
        check_wrapper(self._target, device=self._device, tolerance=tolerance)
