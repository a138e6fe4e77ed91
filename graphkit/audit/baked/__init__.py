"""Which host values did a graph freeze?"""

from graphkit.audit.baked.audit import audit_baked

__all__ = ["audit_baked"]
