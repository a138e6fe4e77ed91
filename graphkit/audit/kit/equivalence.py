"""Assertions that replays agree with the forward without graphs and without padding."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch

from graphkit.audit.audit_log import AuditLog
from graphkit.audit.finding_kinds import FindingKind
from graphkit.audit.loop import check_loop
from graphkit.audit.padding_cause import Cause, padding_cause
from graphkit.audit.runs.engine_step import LOOP_STEPS, EngineStep, compare_steps, open_step
from graphkit.audit.runs.equal_state_runs import (
    NOT_FINITE,
    Comparison,
    EqualStateRuns,
    compare_runs,
    live_sizes,
)
from graphkit.audit.undeclared_state import undeclared_state
from graphkit.errors import ConfigError, ReplayError, TargetError, short_repr
from graphkit.records import Finding, Mismatch, count_of, distinct_text
from graphkit.runners import Runner
from graphkit.runners.comparison import (
    GRAPH_DIFFERS,
    INPUT_WRITTEN,
    PADDING_LEAKS,
    Rounding,
    check_tolerance,
)
from graphkit.runners.comparison.differences import (
    Allowed,
    Tensors,
    allowed_by,
    even_owner,
    first_difference,
)
from graphkit.runners.targets import CaptureTarget, selected_modes
from graphkit.spec import ForwardMode

STEP_PROPERTIES = ("equivalence", "loop")
"""Names of the properties: replays are right, and a launch of many steps equals single ones."""
_AT_FAULT = {
    GRAPH_DIFFERS: "graph",
    PADDING_LEAKS: "padding",
    INPUT_WRITTEN: "forward",
    NOT_FINITE: "forward",
}
_ROUNDING_IN_GRAPH = (
    "rounding, or a frozen value. The graph differs by no more than kernels that add in another "
    "order. `graphkit audit --only frozen,shadow` names the node that differs."
)


def assert_replay_equivalent(
    runner: Runner[Any, Any],
    batches: Iterable[Any],
    *,
    tolerance: float = 1.0,
    rtol: float | None = None,
    atol: float | None = None,
    padded_batch_size: int | None = None,
) -> None:
    """Fail unless replays of the batches are right.

    Each batch runs three times from the same state: as a replay, as the same padded step without a
    graph, and unpadded. The first two must agree bit for bit, unless repeated runs of the padded
    step differ by rounding, too. The unpadded step may run other kernels, so it may differ by 256
    units in the last place (ulp) of float32, or 16 of bfloat16, whichever the step computes in.
    Where a step chooses tokens, it follows the choices of the padded step, so that near ties are no
    difference. The runner's ``mutable_state``, tensors of its attention backend, and random numbers
    are restored after each run.

    Args:
        runner: Captured.
        batches: The mode's inputs with live rows; at least one batch.
        tolerance: Multiple of the usual rounding that is allowed, as ``graphkit audit --tolerance``
            takes it.
        rtol: Allowed difference between padded and unpadded numbers, relative to the unpadded one,
            instead of the limit in ulp.
        atol: Allowed absolute difference, in addition to ``rtol``.
        padded_batch_size: Captured size to run at. ``None`` selects the smallest that fits and, if
            it leaves no room for pads, the next larger one as well.

    Raises:
        AssertionError: A replay is wrong, or a batch has no graph. The text says where and by how
            much, whether the graph or padding is at fault, and which bug is probable.
        ConfigError: A tolerance is negative or not a number, or ``tolerance`` contradicts ``rtol``
            or ``atol``.
        ReplayError: The runner is not captured.
        TargetError: ``batches`` is empty.
    """
    allowed = _allowed(tolerance, rtol, atol)
    if runner.status != "captured":
        why = runner.eager_reason or f"runner is {runner.status}"
        raise ReplayError(f"{why}: there is no replay to compare. Capture the runner first.")
    remaining = iter(batches)
    first = next(remaining, None)
    if first is None:
        raise TargetError("there is no batch to compare. Give at least one.")
    for batch in chain([first], remaining):
        for size in _compared_sizes(runner, batch, padded_batch_size):
            comparison = compare_runs(runner, batch, size, allowed, tolerance=tolerance)
            if comparison.mismatches:
                bug = _probable_bug(runner, batch, size, comparison.mismatches[0])
                raise AssertionError(_comparison_text(comparison, bug))


def assert_target_equivalent(
    target: CaptureTarget,
    *,
    modes: Sequence[ForwardMode] | None = None,
    batch_sizes: Sequence[int] | None = None,
    device: str = "auto",
    tolerance: float = 1.0,
    rtol: float | None = None,
    atol: float | None = None,
) -> None:
    """Capture a target, and fail unless replays of its sample batches are right at every size.

    The whole step of an engine (STEP) must agree with the same padded step without a graph bit for
    bit, and a launch of several steps with single ones.

    Args:
        target: What to capture.
        modes: Modes to capture; ``None`` selects all modes of the target.
        batch_sizes: Sizes to capture; ``None`` selects the target's.
        device: ``auto``, ``cpu`` or ``cuda``.
        tolerance: As for ``assert_replay_equivalent``.
        rtol: As for ``assert_replay_equivalent``.
        atol: As for ``assert_replay_equivalent``.

    Raises:
        AssertionError: A replay is wrong.
        CaptureError: A forward cannot be captured.
        ConfigError: A tolerance is invalid, see ``assert_replay_equivalent``.
        TargetError: The target lacks a mode.
    """
    for mode in selected_modes(target, modes):
        if mode not in target.forwards:
            with open_step(target, batch_sizes=batch_sizes, device=device) as step:
                step.capture()
                for size in () if step.eager_reason else step.runner.table:
                    for name in STEP_PROPERTIES:
                        check_step(step, name, size, tolerance)
            continue
        with target.runner(mode, batch_sizes=batch_sizes, device=device) as runner:
            runner.capture()
            for size in () if runner.eager_reason else runner.table:
                batches = sample_batches(target, runner, size)
                assert_replay_equivalent(
                    runner,
                    batches,
                    tolerance=tolerance,
                    rtol=rtol,
                    atol=atol,
                    padded_batch_size=size,
                )


@torch.no_grad()
def check_step(step: EngineStep, name: str, size: int, tolerance: float) -> None:
    """Check a property at a captured size.

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
                bug = _frozen_value("loop", "first step and the state that differ")
                raise AssertionError(_comparison_text(comparison, bug))
    finally:
        runs.release()


def sample_batches(target: CaptureTarget, runner: Runner[Any, Any], size: int) -> Iterator[Any]:
    """Return sample batches of the live sizes to try at a captured size."""
    return (target.batch(runner.mode, live, live) for live in live_sizes(runner.table, size))


def _allowed(tolerance: float, rtol: float | None, atol: float | None) -> Allowed | None:
    check_tolerance(tolerance)
    limits = {name: value for name, value in (("rtol", rtol), ("atol", atol)) if value is not None}
    for name, value in limits.items():
        if not _is_limit(value):
            raise ConfigError(
                f"{name} must be a number of at least 0, got {short_repr(value)}.", field=name
            )
        if tolerance != 1.0:
            raise ConfigError(
                f"tolerance is a multiple of the usual limit, which {name} replaces. Pass one of "
                "them.",
                field="tolerance",
            )
    return allowed_by(**{"rtol": 0.0, "atol": 0.0} | limits) if limits else None


def _is_limit(value: object) -> bool:
    return isinstance(value, (int, float)) and value >= 0


def _compared_sizes(runner: Runner[Any, Any], batch: Any, size: int | None) -> tuple[int, ...]:
    """Return the captured sizes to compare a batch at; none for an idle batch."""
    decision = runner.can_replay(batch)
    if not decision:
        raise AssertionError(
            f"{runner.mode.name}: a batch of {count_of(batch.batch_size, 'request')} has no graph: "
            f"{decision.reason}."
        )
    if not batch.batch_size:  # it launches nothing
        return ()
    if size is not None:
        return (size,)
    assert decision.padded_batch_size is not None, "a batch with requests has a size"
    larger = [size for size in runner.table if size > batch.batch_size]
    return tuple(dict.fromkeys((decision.padded_batch_size, *larger[:1])))


def _comparison_text(comparison: Comparison, bug: str) -> str:
    """Return the text of a comparison that found a wrong replay, with the probable bug."""
    mismatch = comparison.mismatches[0]
    expected, got = distinct_text(mismatch.expected, mismatch.got)
    if mismatch.kind == NOT_FINITE:
        expected = "a finite number"
    distance = f"  distance: {mismatch.distance}\n" if mismatch.distance else ""
    return (
        f"{mismatch.mode}: the replay of {count_of(mismatch.batch_size, 'live request')} at "
        f"captured size {mismatch.padded_batch_size} is wrong: {mismatch.kind}.\n"
        f"  at fault: {_AT_FAULT[mismatch.kind]}\n"
        f"  where: {mismatch.field}, row {mismatch.row}, request {mismatch.request}\n"
        f"  expected: {expected}\n"
        f"  got: {got}\n{distance}"
        f"  largest difference: {comparison.largest_difference:.3g}\n"
        f"  probable bug: {bug}"
    )


def fail_on_errors(findings: Iterable[Finding]) -> None:
    """Fail if a finding is an error.

    Raises:
        AssertionError: One is. The text has all findings.
    """
    found = list(findings)
    if any(finding.severity == "error" for finding in found):
        raise AssertionError("\n\n".join(map(_finding_text, found)))


def _finding_text(finding: Finding) -> str:
    size = f"{finding.mode} {finding.batch_size or ''}".rstrip()
    lines = [f"{finding.kind}: {size}: {finding.text}"]
    if finding.before or finding.after:
        lines += [f"  expected: {finding.before}", f"  got: {finding.after}"]
    lines += [f"  at: {where}" for where in (finding.module, finding.source) if where]
    return "\n".join([*lines, f"  {finding.advice}"])


def _probable_bug(runner: Runner[Any, Any], batch: Any, size: int, wrong: Mismatch) -> str:
    """Return the probable kind of finding, where it begins, and advice.

    Restores state and random numbers.
    """
    if wrong.kind == NOT_FINITE:
        return f"{FindingKind.NOT_FINITE_OUTPUT}. `graphkit audit --only finite` names the module."
    if wrong.kind == INPUT_WRITTEN:
        kind = FindingKind.WRITTEN_INPUT
        place = ", ".join(filter(None, (wrong.module, wrong.source)))
        return f"{kind}. {kind.advice}" + (f"\n  at: {place}" if place else "")
    undeclared, _ = undeclared_state(runner, batch) if runner.group is None else ({}, [])
    if undeclared:
        kind = FindingKind.UNDECLARED_STATE
        names = ", ".join(f"`{name}`" for name in undeclared)
        return f"{kind}. A replay changes {names}. {kind.advice}"
    rounding = Rounding(runner.sizes.dtype)

    def differ(one: Tensors, other: Tensors, allowed: float = 0.0) -> bool:
        return first_difference(one, other, even_owner(1), rounding, allowed) is not None

    with EqualStateRuns(runner, batch, size) as runs:
        padded, replayed = runs.padded(), runs.replay()
        if differ(padded, runs.padded()) or differ(replayed, runs.replay()):
            return _text(Cause(FindingKind.NONDETERMINISTIC_STEP, runs.first_unstable_node()))
        if wrong.kind != PADDING_LEAKS:
            is_large = differ(padded, replayed, rounding.most)
            return _frozen_value("frozen,pointers", "node") if is_large else _ROUNDING_IN_GRAPH
        return _text(padding_cause(runs))


def _frozen_value(audits: str, found: str) -> str:
    """Return why a graph differs from the same step without it, and which audits find what."""
    return (
        f"{FindingKind.FROZEN_VALUE}. The graph kept a host value of its capture, or reads memory "
        f"that was replaced since. `graphkit audit --only {audits}` names the {found}."
    )


def _text(cause: Cause) -> str:
    place = f"\n  at: {cause.place}" if cause.place else ""
    return f"{cause.kind}.{cause.text} {cause.kind.advice}{place}"
