"""Search for memory of the graph pool that a replay reads before it writes it."""

from graphkit.audit.stale_memory.runner_graph import audit_stale_memory

__all__ = ["audit_stale_memory"]
