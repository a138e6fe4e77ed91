"""Search for pad rows and earlier batches that affect live rows or declared state."""

from graphkit.audit.pads.audit import audit_pads

__all__ = ["audit_pads"]
