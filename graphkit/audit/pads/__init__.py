"""Do pad rows reach live rows, or memory that is not theirs?"""

from graphkit.audit.pads.audit import audit_pads, live_sizes

__all__ = ["audit_pads", "live_sizes"]
