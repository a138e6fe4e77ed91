"""Attention backends: metadata per mode, and attention over a paged KV pool."""

from graphkit.attention.absorbed import AbsorbedProjections
from graphkit.attention.backend import AttentionBackend, AttentionInputs, PooledAttention
from graphkit.attention.metadata import AttentionMetadata
from graphkit.attention.paged import PagedAttention
from graphkit.attention.sdpa import SdpaAttention
from graphkit.attention.sparse import IndexRows, SparseAttention
from graphkit.attention.triton_paged import TritonAttention

__all__ = [
    "AbsorbedProjections",
    "AttentionBackend",
    "AttentionInputs",
    "AttentionMetadata",
    "IndexRows",
    "PagedAttention",
    "PooledAttention",
    "SdpaAttention",
    "SparseAttention",
    "TritonAttention",
]
