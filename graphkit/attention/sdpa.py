"""Attention by torch operations over a dense copy of the pages.

Suffixes: B requests, W most rows of a request, T rows of all, N query heads, M key-value heads,
D head size, L keys.
"""

# ruff: noqa: N803, N806 - suffixes of tensor names are dimensions
from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn.functional import scaled_dot_product_attention

from graphkit.attention.paged import PagedAttention
from graphkit.ops.attention_layout import key_slots, pack_rows, pad_rows, visible_keys

if TYPE_CHECKING:
    import torch

    from graphkit.attention.metadata import AttentionMetadata


class SdpaAttention(PagedAttention):
    """Runs on any device as ATen ops; its memory grows with max_context_len."""

    def _attend(
        self, layer: int, query_TND: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor:
        tokens, starts, width = len(query_TND), metadata.cu_seqlens_q, metadata.max_seqlen_q
        if not tokens:
            return query_TND.clone()
        page_size = self.kv_pool.page_size
        max_keys = metadata.page_table.shape[1] * page_size
        visible_BWL = visible_keys(metadata.cache_seqlens, starts, metadata.mask, max_keys, width)
        seen_BL = visible_BWL.any(1)
        slots_BL = key_slots(metadata.page_table, page_size, seen_BL)
        group = query_TND.shape[1] // self.kv_pool.head_num

        def dense(cache: torch.Tensor) -> torch.Tensor:
            # 0 * NaN is NaN: hidden keys and values are zeroed, not only masked.
            rows_BLMD = cache[slots_BL].masked_fill(~seen_BL[:, :, None, None], 0)
            return rows_BLMD.to(query_TND.dtype).transpose(1, 2).repeat_interleave(group, 1)

        out_BNWD = scaled_dot_product_attention(
            pad_rows(query_TND, starts, width).transpose(1, 2),
            dense(self.kv_pool.get_key_buffer(layer)),
            dense(self.kv_pool.get_value_buffer(layer)),
            attn_mask=visible_BWL[:, None],
            scale=self.scale,
        )
        blind_BW11 = ~visible_BWL.any(2)[:, :, None, None]
        out_BWND = out_BNWD.transpose(1, 2).masked_fill(blind_BW11, 0)
        return pack_rows(out_BWND, starts, tokens)
