"""The audit of device loops: many steps in one launch against the same steps without a graph."""

from graphkit.audit.loop.audit import audit_loop, check_loop

__all__ = ["audit_loop", "check_loop"]
