"""Search for memory of the graph pool that a replay reads before it writes it."""

from graphkit.audit.pool_poison.audit import audit_pool_poison

__all__ = ["audit_pool_poison"]
