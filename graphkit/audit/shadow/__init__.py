"""Comparison of replays with the same step without a graph, and bisection of a wrong graph."""

from graphkit.audit.shadow.watch import ShadowWatch, audit_shadow

__all__ = ["ShadowWatch", "audit_shadow"]
