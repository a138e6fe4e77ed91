"""The backends over a paged KV pool.

Suffixes: B requests, W most rows of a request, T rows of all, N query heads, M key-value heads,
D head size of keys, E of values, L keys.
"""

# ruff: noqa: N806 - suffixes of tensor names are dimensions
from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from graphkit.engine.attention.paged import PagedAttention
from graphkit.ops.attention_layout import DenseLayout
from graphkit.ops.paged_attention import paged_attention
from graphkit.ops.registration import OPS


class TritonAttention(PagedAttention):
    """One op per layer, ``graphkit::paged_attention``: Triton on CUDA, plain torch on the CPU.

    Attributes:
        is_row_invariant: The ``row_invariant`` of the op. Set it before the first forward.
    """

    skips_absent_rows = is_row_invariant = True

    def _attend(self, args: Any) -> torch.Tensor:
        return paged_attention(*args._replace(row_invariant=self.is_row_invariant))


class SdpaAttention(PagedAttention):
    """Runs on any device as ATen ops; its memory grows with max_context_len.

    Layers with a softcap or sinks, which torch's function does not take, run the reference of
    ``paged_attention``.
    """

    def _attend(self, args: Any) -> torch.Tensor:
        if args.softcap or args.sinks_N is not None:
            out: torch.Tensor = OPS["paged_attention"].run_reference(*args)
            return out
        query_TND: torch.Tensor = args.query_TND
        tokens, heads = query_TND.shape[:2]
        if not tokens:
            return query_TND.new_empty(0, heads, args.value_cache.shape[2])
        layout = DenseLayout(
            tokens, args.page_table, args.cache_seqlens_B, args.cu_seqlens_q_B1, args.mask,
            args.page_size, args.max_seqlen_q, args.window, args.chunked,
        )  # fmt: skip
        group = heads // args.key_cache.shape[1]

        def heads_first(rows: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
            rows = rows.to(query_TND.dtype)
            if scale is not None:
                rows = (rows * scale[:, None]).to(query_TND.dtype)
            rows_BML = rows.transpose(1, 2)
            return rows_BML if group == 1 else rows_BML.repeat_interleave(group, 1)

        key_BLMD, value_BLME = layout.keys(args.key_cache, args.value_cache)
        out_BNWE = scaled_dot_product_attention(
            layout.pad(query_TND).transpose(1, 2),
            heads_first(key_BLMD, args.key_scale_M),
            heads_first(value_BLME, args.value_scale_M),
            attn_mask=layout.visible_BWL[:, None],
            scale=args.scale,
        )
        return layout.pack(out_BNWE.transpose(1, 2))
