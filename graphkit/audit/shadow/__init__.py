"""Comparison of replays with the same step without a graph, and bisection of a wrong graph."""

from graphkit.audit.shadow.audit import audit_shadow
from graphkit.audit.shadow.watch import ShadowWatch

__all__ = ["ShadowWatch", "audit_shadow"]
