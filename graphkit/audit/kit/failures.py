"""Texts of failed checks."""

from __future__ import annotations

from collections.abc import Iterable

from graphkit.audit.runs import NOT_FINITE, Comparison
from graphkit.records import Finding, count_of, distinct_text
from graphkit.runners.comparison import INPUT_WRITTEN, PADDING_LEAKS


def comparison_text(comparison: Comparison, probable_bug: str) -> str:
    """Return the text of a comparison that found a wrong replay.

    Args:
        comparison: Has a mismatch.
        probable_bug: Probable class of bug, and advice.
    """
    mismatch = comparison.mismatches[0]
    size = mismatch.padded_batch_size
    if mismatch.kind == NOT_FINITE:
        return (
            f"{mismatch.mode}: {mismatch.kind}: row {mismatch.row} of {mismatch.field} (request "
            f"{mismatch.request} of {mismatch.batch_size}) is {mismatch.got} at captured size "
            f"{size}. `graphkit audit --only finite` names the module."
        )
    expected, got = distinct_text(mismatch.expected, mismatch.got)
    if mismatch.kind == INPUT_WRITTEN:
        location = ", ".join(filter(None, (mismatch.module, mismatch.source)))
        return (
            f"{mismatch.mode}: {mismatch.kind}: row {mismatch.row} of {mismatch.field} (request "
            f"{mismatch.request} of {mismatch.batch_size}) is {got} after the forward and "
            f"{expected} before it{f', made by {location}' if location else ''}."
        )
    distance = f"  distance: {mismatch.distance}\n" if mismatch.distance else ""
    return (
        f"{mismatch.mode}: the replay of {count_of(mismatch.batch_size, 'live request')} at "
        f"captured size {size} is wrong: {mismatch.kind}.\n"
        f"  at fault: {'padding' if mismatch.kind == PADDING_LEAKS else 'graph'}\n"
        f"  where: {mismatch.field}, row {mismatch.row}, request {mismatch.request}\n"
        f"  expected: {expected}\n"
        f"  got: {got}\n{distance}"
        f"  largest difference: {comparison.largest_difference:.3g}\n"
        f"  probable bug: {probable_bug}"
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
