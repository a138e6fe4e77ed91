"""Audits: each searches the graphs of a target for one cause of silently wrong replays.

``report.py`` runs them all. An audit is one file, or one folder whose ``audit.py`` says what it
varies; beside it are what it compares, and in ``findings.py``, where that is long, how it words
what it found. Runs come from ``graphkit.audit.runs``, and findings go to an ``AuditLog``.
"""

from graphkit.lazy_names import public_names

__getattr__, __dir__, __all__ = public_names(__name__, __file__)
