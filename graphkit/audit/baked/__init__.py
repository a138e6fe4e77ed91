"""Search for host values that a graph captured."""

from graphkit.audit.baked.audit import audit_baked

__all__ = ["audit_baked"]
