"""Audits: each searches the graphs of a target for one cause of silently wrong replays."""

from graphkit.audit.audit_log import AuditLog, Check
from graphkit.audit.lock import fingerprint
from graphkit.audit.loop import audit_loop
from graphkit.audit.ranks import merged_reports
from graphkit.audit.report import AUDITS, audit_target, lock_target
from graphkit.audit.shadow import ShadowWatch

__all__ = [
    "AUDITS",
    "AuditLog",
    "Check",
    "ShadowWatch",
    "audit_loop",
    "audit_target",
    "fingerprint",
    "lock_target",
    "merged_reports",
]
