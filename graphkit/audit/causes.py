"""One finding per cause: findings of several modes and sizes that share it, merged and ordered."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from graphkit.records import Finding
from graphkit.records.audit import SEVERITIES


def merged_by_cause(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return one finding per cause with all its modes and sizes: errors, then warnings, then notes.

    Findings of equal severity keep the order in which the audits reported them. The text is that
    of the first finding of a cause.
    """
    groups: dict[tuple[str, ...], list[Finding]] = {}
    for finding in findings:
        groups.setdefault(_cause(finding), []).append(finding)
    merged = _without_consequences([_merged(each) for each in groups.values()])
    return tuple(sorted(merged, key=lambda each: SEVERITIES.index(each.severity)))


def _cause(finding: Finding) -> tuple[str, ...]:
    cause = finding.cause or "; ".join(
        # Numbers of nodes, rows and requests differ from size to size.
        (re.sub(r"\d+", "", finding.text), finding.kernel, finding.module, finding.source)
    )
    return finding.audit, finding.kind, finding.severity, cause


def _merged(findings: Sequence[Finding]) -> Finding:
    return replace(
        findings[0],
        modes=tuple(dict.fromkeys(each.mode for each in findings if each.mode)),
        batch_sizes=tuple(sorted({each.batch_size for each in findings} - {0})),
        names=tuple(dict.fromkeys(name for each in findings for name in each.names)),
    )


def _without_consequences(findings: Sequence[Finding]) -> list[Finding]:
    """Drop what ``shadow`` sees in modes where ``pads`` has found the cause.

    Also drop what ``baked`` says of an argument for which ``shadow`` names a host number.
    """
    explained = {
        (kind, mode)
        for each in findings
        if each.audit == "pads"
        for kind in (each.kind, *(["padding bug"] if each.severity == "error" else []))
        for mode in each.modes
    }
    named = {
        (each.kernel, each.source, each.argument)
        for each in findings
        if (each.audit, each.kind) == ("shadow", "baked value")
    }
    return [
        each
        for each in findings
        if each.audit != "baked" or (each.kernel, each.source, each.argument) not in named
        if each.audit != "shadow" or not {(each.kind, mode) for mode in each.modes} <= explained
    ]
