"""Merge of findings that share a cause, so that each cause is reported once."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from graphkit.audit.finding_kinds import FindingKind
from graphkit.records import Finding
from graphkit.records.audit import Audit, worst_first

_EARLIER: Mapping[str, Sequence[str]] = {
    Audit.PADS: (Audit.WARMUP,),
    Audit.SHADOW: (Audit.WARMUP, Audit.PADS),
}
"""For an audit, the audits that run before it and may report the same cause."""
_REPLACED = (FindingKind.FREED_MEMORY, FindingKind.REPLACED_BUFFER)
"""What makes captures differ in the memory that they read."""
REPLACED_MEMORY = "replaced memory"
"""Cause of captures that differ in nothing but the memory that they read."""


def merged_by_cause(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return one finding per cause with all its modes and sizes: errors, then warnings, then notes.

    Findings of equal severity keep the order in which the audits reported them. The text is that
    of the first finding of a cause.
    """
    groups: dict[tuple[str, ...], list[Finding]] = {}
    for finding in findings:
        groups.setdefault(_cause(finding), []).append(finding)
    return worst_first(_without_consequences([_merged(group) for group in groups.values()]))


def _cause(finding: Finding) -> tuple[str, ...]:
    cause = finding.cause or "; ".join(
        # Numbers of nodes, rows and requests differ from size to size.
        (re.sub(r"\d+", "", finding.text), finding.kernel, finding.module, finding.source)
    )
    return finding.audit, finding.kind, finding.severity, cause


def _merged(findings: Sequence[Finding]) -> Finding:
    return replace(
        findings[0],
        modes=tuple(dict.fromkeys(finding.mode for finding in findings if finding.mode)),
        batch_sizes=tuple(sorted({finding.batch_size for finding in findings} - {0})),
        names=tuple(dict.fromkeys(name for finding in findings for name in finding.names)),
    )


def _without_consequences(findings: Sequence[Finding]) -> list[Finding]:
    """Drop findings whose cause another finding reports.

    An earlier audit must report it in all modes of the finding. A host number that ``frozen``
    finds, and a warm-up leak, are dropped in any mode.
    """
    kept: list[Finding] = []
    named_by_shadow = {
        _argument(finding)
        for finding in findings
        if (finding.audit, finding.kind) == (Audit.SHADOW, FindingKind.FROZEN_VALUE)
    }
    for finding in findings:
        if finding.audit == Audit.FROZEN and _argument(finding) in named_by_shadow:
            continue  # shadow reports it with the name of the host number
        if finding.cause == REPLACED_MEMORY and any(
            other.kind in _REPLACED and {*finding.modes} <= {*other.modes} for other in findings
        ):
            continue  # each capture reads the tensor that the one before has put there
        earlier = [other for other in kept if other.audit in _EARLIER.get(finding.audit, ())]
        reported = {
            mode for other in earlier if _shares_cause(finding, other) for mode in other.modes
        }
        is_reported = finding.modes and {*finding.modes} <= reported
        if finding.kind == FindingKind.NONDETERMINISTIC_STEP and any(
            _is_leak_of(finding.module, other) for other in findings
        ):
            continue  # each replay starts from what the one before left
        if not is_reported and not any(_explains_leak(other, finding) for other in findings):
            kept.append(finding)
    return kept


def _shares_cause(finding: Finding, earlier: Finding) -> bool:
    """Return whether a finding has the kind, or the line and kernel, of an earlier audit's.

    An earlier finding of ``warmup`` must also name all of its tensors.
    """
    if earlier.audit == Audit.WARMUP:
        return finding.kind == earlier.kind and {*finding.names} <= {*earlier.names}
    is_same_line = finding.source == earlier.source != "" and finding.kernel == earlier.kernel
    return finding.kind == earlier.kind or (is_same_line and finding.severity == earlier.severity)


def _explains_leak(cause: Finding, leak: Finding) -> bool:
    """Return whether a finding says why the capture changes the tensors of a warm-up leak.

    They are undeclared state, statistics over rows (as of a batch norm) that a module keeps, or
    tensors that each call of the forward leaves there.
    """
    if cause.kind == FindingKind.SIDE_OUTPUT and leak.audit == Audit.WARMUP and cause is not leak:
        return bool(leak.names) and all(_holds(name, cause.names) for name in leak.names)
    if leak.kind != FindingKind.WARM_UP_LEAK or not leak.names:
        return False
    if cause.kind == FindingKind.UNDECLARED_STATE:
        return {*leak.names} <= {*cause.names}
    is_error = cause.audit in (Audit.PADS, Audit.SHADOW) and cause.severity == "error"
    is_repeatable = cause.kind != FindingKind.NONDETERMINISTIC_STEP
    return is_error and is_repeatable and _is_leak_of(cause.module, leak)


def _is_leak_of(module: str, finding: Finding) -> bool:
    """Return whether a finding is a warm-up leak of tensors that a module holds itself."""
    owners = {name.rpartition(".")[0] for name in finding.names}
    return finding.kind == FindingKind.WARM_UP_LEAK and bool(module) and owners == {module}


def _holds(name: str, tensors: Sequence[str]) -> bool:
    return any(tensor == name or tensor.startswith(f"{name}[") for tensor in tensors)


def _argument(finding: Finding) -> tuple[str, str, int | None]:
    return finding.kernel, finding.source, finding.argument
