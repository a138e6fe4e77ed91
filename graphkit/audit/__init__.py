"""Audits: each searches the graphs of a target for one cause of silently wrong replays.

``report.py`` runs them all. An audit is one file, or one folder whose ``audit.py`` says what it
varies; beside it are what it compares, and in ``findings.py``, where that is long, how it words
what it found. Runs come from ``graphkit.audit.runs``, and findings go to an ``AuditLog``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graphkit.audit.audit_log import AuditLog, Check
    from graphkit.audit.baseline import graph_hash
    from graphkit.audit.loop import audit_loop
    from graphkit.audit.ranks import merged_reports
    from graphkit.audit.report import audit_target, graph_baseline
    from graphkit.audit.shadow import ShadowWatch
    from graphkit.records.audit import AUDITS, Audit

_MODULES = {
    "AUDITS": "records.audit",
    "Audit": "records.audit",
    "AuditLog": "audit.audit_log",
    "Check": "audit.audit_log",
    "ShadowWatch": "audit.shadow",
    "audit_loop": "audit.loop",
    "audit_target": "audit.report",
    "graph_hash": "audit.baseline",
    "graph_baseline": "audit.report",
    "merged_reports": "audit.ranks",
}

__all__ = [
    "AUDITS",
    "Audit",
    "AuditLog",
    "Check",
    "ShadowWatch",
    "audit_loop",
    "audit_target",
    "graph_baseline",
    "graph_hash",
    "merged_reports",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'graphkit.audit' has no attribute {name!r}")
    return getattr(import_module(f"graphkit.{_MODULES[name]}"), name)
