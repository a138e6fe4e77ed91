"""Audits: each searches the graphs of a target for one cause of silently wrong replays.

``report.py`` runs them all. An audit is one file, or one folder whose ``audit.py`` says what it
varies; beside it are what it compares, and in ``findings.py``, where that is long, how it words
what it found. Runs come from ``graphkit.verify``, and findings go to an ``AuditLog``.
"""

from graphkit.audit.audit_log import AuditLog, Check
from graphkit.audit.lock import fingerprint
from graphkit.audit.loop import audit_loop
from graphkit.audit.ranks import merged_reports
from graphkit.audit.report import audit_target, lock_target
from graphkit.audit.shadow import ShadowWatch
from graphkit.records.audit import AUDITS, Audit

__all__ = [
    "AUDITS",
    "Audit",
    "AuditLog",
    "Check",
    "ShadowWatch",
    "audit_loop",
    "audit_target",
    "fingerprint",
    "lock_target",
    "merged_reports",
]
