"""Search for rows whose bits depend on anything but the row: its batch, its place, its chunk."""

from graphkit.audit.rows.audit import audit_rows

__all__ = ["audit_rows"]
