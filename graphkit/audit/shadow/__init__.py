"""Are replays what the same step makes without a graph, and where do they begin to differ?"""

from graphkit.audit.shadow.watch import ShadowWatch, audit_shadow

__all__ = ["ShadowWatch", "audit_shadow"]
