"""Attention by the kernel of this package.

Suffixes: T rows, N query heads, D head size.
"""

# ruff: noqa: N803 - suffixes of tensor names are dimensions
from __future__ import annotations

from typing import TYPE_CHECKING

from graphkit.attention.paged import PagedAttention
from graphkit.ops.paged_attention import paged_attention

if TYPE_CHECKING:
    import torch

    from graphkit.attention.metadata import AttentionMetadata


class TritonAttention(PagedAttention):
    """One op per layer, ``graphkit::paged_attention``: Triton on CUDA, plain torch on the CPU."""

    def _attend(
        self, layer: int, query_TND: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor:
        keys, values = self.kv_pool.get_key_buffer(layer), self.kv_pool.get_value_buffer(layer)
        out: torch.Tensor = paged_attention(
            query_TND, keys, values, metadata.page_table, metadata.cache_seqlens,
            metadata.cu_seqlens_q, metadata.mask, self.scale, self.kv_pool.page_size,
            metadata.max_seqlen_q,
        )  # fmt: skip
        return out
