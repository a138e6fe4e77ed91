"""Search for the first step of a device loop that differs from the same step without a graph."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

import torch

from graphkit.audit.audit_log import AuditLog, Check
from graphkit.audit.finding_kinds import FindingKind
from graphkit.audit.node_switches import bisected
from graphkit.audit.object_snapshot import ObjectSnapshot
from graphkit.audit.runs.request_runs import ReportRows, RequestPrompts, RequestRun, RequestRuns
from graphkit.config import require_int
from graphkit.engine.step import SpecStepRunner
from graphkit.records import Finding, count_of, distinct_text, listed
from graphkit.records.audit import Audit
from graphkit.runners.comparison import Rounding, check_tolerance

_SHOWN = 3
"""Most names that a text lists."""
_FROZEN = (
    "A graph keeps the host values and the addresses of its capture. Keep what changes in tensors "
    "by request row, as FutureMap.stash does, and write them in place."
)
_NOT_REPEATABLE = (
    "Let prefill set all state of a request, and use deterministic kernels. Loops of a step that "
    "is not repeatable cannot be checked."
)


def audit_loop(
    runner: SpecStepRunner, requests: RequestPrompts, *, steps: int = 8, tolerance: float = 1.0
) -> tuple[Finding, ...]:
    """Compare one launch of many steps with the same steps run one by one without a graph.

    The requests run from their prompts each time. Their reports and their state must agree after
    each step: ``RequestState``, ``FutureMap``, the KV of their committed tokens, and recurrent
    state. If a launch differs, shorter ones find its first wrong step, and launches of one step
    show whether the graph or the loop is the cause. The rows are released in the end.

    Args:
        runner: Captured. Nothing else uses it meanwhile.
        requests: Prompt and sampling parameters by free request row, whose KV slots are in
            ``req_to_token``. Requests that end after different numbers of steps make the loop
            change its size.
        steps: Most steps of the launch.
        tolerance: Multiple of the usual rounding that is allowed, see ``Rounding``.

    Returns:
        The finding of the first step that differs, or none.

    Raises:
        ConfigError: ``steps`` or ``tolerance`` is out of range.
        InputError: A request is invalid, see ``SpecStepRunner.admit``.
        ReplayError: The runner is not captured, or has no loops.
    """
    require_int("audit_loop", "steps", steps)
    check_tolerance(tolerance)
    log = AuditLog(tolerance)
    check_loop(RequestRuns(runner, requests), steps, log)
    return tuple(log.findings)


def check_loop(runs: RequestRuns, steps: int, log: AuditLog) -> None:
    """Log the check and the finding of ``audit_loop``, and release the rows."""
    with torch.no_grad(), log.check(Audit.LOOP, runs.runner.mode.name) as check:
        try:
            _Search(runs, steps, log.tolerance).report_to(check)
        finally:
            runs.release()


class _Search:
    """Runs the requests without a graph, and launches that are compared with it.

    Attributes:
        expected: The runs without a graph, by number of steps.
        count: Steps of the longest.
    """

    def __init__(self, runs: RequestRuns, steps: int, tolerance: float) -> None:
        runner = runs.runner
        self._runs, self._rounding = runs, Rounding(runner.sizes.dtype, tolerance)
        drafter, target = runner.spec_step.drafter, runner.spec_step.verifier.runner
        self._roots = {
            "draft": drafter.draft,
            "extend": drafter.extend,
            target.step.name: target.step.forward,
        }
        self._start = ObjectSnapshot(self._roots, {})
        self.expected = runs.eager(steps)
        self.count = len(self.expected) - 1
        changes = self._start.changes(ObjectSnapshot(self._roots, {}))
        self._unrepeated = [change.name for change in changes]
        self._start.restore()

    def report_to(self, check: Check) -> None:
        """Report the first step after which the launch differs."""
        launched = self._runs.launched(self.count, self.count)
        if not self._differences(self.count, launched):
            check.text = f"{count_of(self.count, 'step')} in one launch: no difference"
            return
        if self._is_repeatable(check):
            self._report_step(self._first_wrong_step(launched.reports), check)

    def _is_repeatable(self, check: Check) -> bool:
        again = self._runs.eager(self.count)
        self._start.restore()
        for number, run in enumerate(again):
            if differences := self._differences(number, run):
                names = listed(differences, _SHOWN)
                check.report(
                    FindingKind.NONDETERMINISTIC_STEP,
                    f"After {count_of(number, 'step')} without a graph, {names} differ "
                    "from the same steps before.",
                    severity="warning",
                    advice=_NOT_REPEATABLE,
                    names=tuple(differences),
                )
                return False
        return True

    def _first_wrong_step(self, reports: Sequence[ReportRows]) -> int:
        """Return the number of the first step after which a launch differs, by bisection."""
        pairs = zip_longest(self.expected[-1].reports, reports)
        steps = (number for number, (one, other) in enumerate(pairs, 1) if one != other)
        wrong = next(steps, self.count)

        def differs(count: int) -> bool:
            return bool(self._differences(count, self._runs.launched(count, count)))

        index = bisected(differs, wrong)
        return wrong if index is None else index + 1

    def _report_step(self, number: int, check: Check) -> None:
        differences = self._differences(number, self._runs.launched(number, number))
        name, (before, after) = next(iter(differences.items()))
        text = f"After step {number} of a launch, {listed(differences, _SHOWN)} differ "
        text += f"from the same steps without a graph: {name} has {after} instead of {before}."
        if self._differences(number, self._runs.launched(number, 1)):
            kind, advice = FindingKind.FROZEN_VALUE, _FROZEN
            text += " So they do in launches of one step."
            if self._unrepeated:
                names = listed(self._unrepeated, _SHOWN)
                text += f" Without a graph, the step changes {names} on the host."
        else:
            kind = FindingKind.MISSING_HOST_WORK
            advice = kind.advice
            text += " In launches of one step they agree: something outside the step changes them."
        check.report(
            kind,
            text,
            advice=advice,
            names=(*differences, *self._unrepeated),
            before=before,
            after=after,
            field=name,
        )

    def _differences(self, steps: int, got: RequestRun) -> dict[str, tuple[str, str]]:
        """Return the expected and the actual value of what differs after some steps, by name."""
        mismatches = self.expected[steps].differences(got, self._rounding)
        return {name: distinct_text(one.expected, one.got) for name, one in mismatches.items()}
