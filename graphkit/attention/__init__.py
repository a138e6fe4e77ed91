"""Attention backends: metadata per mode, and attention over a paged KV pool."""

from graphkit.attention.absorbed import AbsorbedProjections
from graphkit.attention.backend import AttentionBackend, AttentionInputs, PooledAttention
from graphkit.attention.metadata import AttentionMetadata
from graphkit.attention.paged import PagedAttention
from graphkit.attention.paged_backends import SdpaAttention, TritonAttention
from graphkit.attention.sparse import IndexRows, SparseAttention
from graphkit.ops.heads import ProjectedHeads

__all__ = [
    "AbsorbedProjections",
    "AttentionBackend",
    "AttentionInputs",
    "AttentionMetadata",
    "IndexRows",
    "PagedAttention",
    "PooledAttention",
    "ProjectedHeads",
    "SdpaAttention",
    "SparseAttention",
    "TritonAttention",
]
