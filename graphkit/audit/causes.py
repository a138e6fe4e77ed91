"""One finding per cause: findings of several modes and sizes that share it, merged and ordered."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from graphkit.records import Finding
from graphkit.records.audit import SEVERITIES

_EARLIER = {"pads": ("warmup",), "shadow": ("warmup", "pads")}
"""Audits that find a cause before an audit finds what follows from it."""
_WARM_UP_LEAK, _UNDECLARED = "warm-up leak", "undeclared state"


def merged_by_cause(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return one finding per cause with all its modes and sizes: errors, then warnings, then notes.

    Findings of equal severity keep the order in which the audits reported them. The text is that
    of the first finding of a cause.
    """
    groups: dict[tuple[str, ...], list[Finding]] = {}
    for finding in findings:
        groups.setdefault(_cause(finding), []).append(finding)
    merged = _without_consequences([_merged(group) for group in groups.values()])
    return tuple(sorted(merged, key=lambda finding: SEVERITIES.index(finding.severity)))


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
    """Drop what follows from another finding: in the same modes, it has one kind or one line."""
    kept: list[Finding] = []
    frozen = {_argument(e) for e in findings if (e.audit, e.kind) == ("shadow", "baked value")}
    for finding in findings:
        if finding.audit == "baked" and _argument(finding) in frozen:
            continue  # shadow names the host number
        earlier = [other for other in kept if other.audit in _EARLIER.get(finding.audit, ())]
        known = {mode for other in earlier if _is_same(finding, other) for mode in other.modes}
        is_explained = finding.modes and {*finding.modes} <= known
        if not is_explained and not any(_explains(other, finding) for other in findings):
            kept.append(finding)
    return kept


def _is_same(finding: Finding, earlier: Finding) -> bool:
    if earlier.audit == "warmup":
        return finding.kind == earlier.kind and {*finding.names} <= {*earlier.names}
    is_one_line = finding.source == earlier.source != "" and finding.kernel == earlier.kernel
    return finding.kind == earlier.kind or (is_one_line and earlier.severity == finding.severity)


def _explains(cause: Finding, leak: Finding) -> bool:
    """Return whether a capture changes a tensor because it is state, or statistics over rows."""
    if leak.kind != _WARM_UP_LEAK or not leak.names:
        return False
    if cause.kind == _UNDECLARED:
        return {*leak.names} <= {*cause.names}
    is_of_module = all(name.rpartition(".")[0] == cause.module != "" for name in leak.names)
    return cause.audit in ("pads", "shadow") and cause.severity == "error" and is_of_module


def _argument(finding: Finding) -> tuple[str, str, int | None]:
    return finding.kernel, finding.source, finding.argument
