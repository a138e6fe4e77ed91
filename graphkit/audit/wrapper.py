"""Comparison of a target with the model that it wraps.

A replay of a wrapper that drops a window equals the same wrapper without a graph, so no comparison
of runs finds it.
"""

from __future__ import annotations

from graphkit.audit.audit_log import AuditLog
from graphkit.audit.finding_kinds import FindingKind
from graphkit.models.wrapper import compare_wrapper
from graphkit.records import count_of
from graphkit.records.audit import Audit
from graphkit.runners.targets import CaptureTarget


def audit_wrapper(target: CaptureTarget, log: AuditLog, *, device: str = "auto") -> None:
    """Report the first row whose logits differ from the logits of ``target.model``.

    Args:
        target: The wrapper and its model.
        log: Collects the finding.
        device: ``auto``, ``cpu`` or ``cuda``.

    Raises:
        TargetError: The target or its model cannot be compared, see ``compare_wrapper``.
    """
    with log.check(Audit.WRAPPER) as check:
        if target.model is None:
            check.text = "not run: the target declares no model to compare it with"
            return
        record = compare_wrapper(target, target.model, device=device, tolerance=log.tolerance)
        if record.skipped:
            check.text = f"not run: {record.skipped}"
            return
        check.text = f"{count_of(record.rows, 'row')} compared with the model"
        if record.not_reached:
            check.text += f"; no prompt is longer than {', '.join(record.not_reached)}"
        difference = record.difference
        if difference is not None:
            check.report(
                FindingKind.WRAPPER_DIFFERS,
                difference.text,
                advice=difference.advice,
                mode=difference.mode,
                cause="wrapper",
                field="next_token_logits",
                row=difference.row,
                request=difference.request,
                module=difference.module,
                source=difference.source,
                before=str(difference.expected_token),
                after=str(difference.token),
            )
