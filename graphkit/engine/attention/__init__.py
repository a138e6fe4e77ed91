"""Attention backends: metadata per mode, and attention over a paged KV pool."""

from graphkit.engine.attention.absorbed import AbsorbedProjections, LatentHeads
from graphkit.engine.attention.backend import PooledAttention
from graphkit.engine.attention.paged import PagedAttention
from graphkit.engine.attention.paged_backends import SdpaAttention, TritonAttention
from graphkit.ops.heads import ProjectedHeads

__all__ = [
    "AbsorbedProjections",
    "LatentHeads",
    "PagedAttention",
    "PooledAttention",
    "ProjectedHeads",
    "SdpaAttention",
    "TritonAttention",
]
