"""Texts of failed checks, with the probable bug by further runs of the batch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from graphkit.audit.finding_kinds import FindingKind
from graphkit.audit.padding_cause import Cause, padding_cause
from graphkit.audit.runs import NOT_FINITE, Comparison, EqualStateRuns
from graphkit.audit.undeclared_state import undeclared_state
from graphkit.records import Finding, Mismatch, count_of, distinct_text
from graphkit.runners import Runner
from graphkit.runners.comparison import GRAPH_DIFFERS, INPUT_WRITTEN, PADDING_LEAKS, Rounding
from graphkit.runners.comparison.differences import Tensors, even_owner, first_difference

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


def comparison_text(comparison: Comparison, bug: str) -> str:
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


def probable_bug(runner: Runner[Any, Any], batch: Any, size: int, wrong: Mismatch) -> str:
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
            return frozen_value("frozen,pointers", "node") if is_large else _ROUNDING_IN_GRAPH
        return _text(padding_cause(runs))


def frozen_value(audits: str, found: str) -> str:
    """Return why a graph differs from the same step without it, and which audits find what."""
    return (
        f"{FindingKind.FROZEN_VALUE}. The graph kept a host value of its capture, or reads memory "
        f"that was replaced since. `graphkit audit --only {audits}` names the {found}."
    )


def _text(cause: Cause) -> str:
    place = f"\n  at: {cause.place}" if cause.place else ""
    return f"{cause.kind}.{cause.text} {cause.kind.advice}{place}"
