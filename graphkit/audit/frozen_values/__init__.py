"""Search for host values that a graph captured."""

from graphkit.audit.frozen_values.audit import audit_frozen_values

__all__ = ["audit_frozen_values"]
