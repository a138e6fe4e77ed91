"""Attention by torch operations over a dense copy of the pages.

Suffixes: B requests, W most rows of a request, T rows of all, N query heads, M key-value heads,
D head size of keys, E of values, L keys.
"""

# ruff: noqa: N806 - suffixes of tensor names are dimensions
from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from graphkit.attention.paged import PagedAttention
from graphkit.ops.attention_layout import key_slots, pack_rows, pad_rows, seen_rows, visible_keys
from graphkit.ops.registration import OPS


class SdpaAttention(PagedAttention):
    """Runs on any device as ATen ops; its memory grows with max_context_len.

    Layers with a softcap or sinks, which torch's function does not take, run the reference of
    ``paged_attention``.
    """

    def _attend(self, given: Any) -> torch.Tensor:
        if given.softcap or given.sinks_N is not None:
            out: torch.Tensor = OPS["paged_attention"].run_reference(*given)
            return out
        query_TND: torch.Tensor = given.query_TND
        starts, width = given.cu_seqlens_q_B1, given.max_seqlen_q
        tokens, heads = query_TND.shape[:2]
        if not tokens:
            return query_TND.new_empty(0, heads, given.value_cache.shape[2])
        max_keys = given.page_table.shape[1] * given.page_size
        visible_BWL = visible_keys(
            given.cache_seqlens_B, starts, given.mask, max_keys, width, given.window
        )
        seen_BL = visible_BWL.any(1)
        slots_BL = key_slots(given.page_table, given.page_size, seen_BL)
        group = heads // given.key_cache.shape[1]

        def dense(cache: torch.Tensor) -> torch.Tensor:
            rows_BLMD = seen_rows(cache, slots_BL, seen_BL).to(query_TND.dtype)
            rows_BMLD = rows_BLMD.transpose(1, 2)
            return rows_BMLD if group == 1 else rows_BMLD.repeat_interleave(group, 1)

        out_BNWE = scaled_dot_product_attention(
            pad_rows(query_TND, starts, width).transpose(1, 2),
            dense(given.key_cache),
            dense(given.value_cache),
            attn_mask=visible_BWL[:, None],
            scale=given.scale,
        )
        return pack_rows(out_BNWE.transpose(1, 2), starts, tokens, visible_BWL.any(2))
