"""Attention of draft heads over whole texts, without a cache.

Tensor suffixes: T tokens, N query heads, M key and value heads, D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from graphkit.models.heads.layers import Attend


def causal_attend(batch_size: int, length: int, window: int | None = None) -> Attend:
    """Return an ``attend`` without a cache, for B sequences of length L packed as T = B * L rows.

    Row b * L + i attends to rows b * L to b * L + i, or to the last ``window`` of them. For
    training and full-sequence runs.
    """

    def heads_first(x: Tensor) -> Tensor:
        return x.reshape(batch_size, length, *x.shape[1:]).transpose(1, 2)

    def attend(layer: int, query_TND: Tensor, key_TMD: Tensor, value_TMD: Tensor) -> Tensor:
        del layer  # all layers use the same mask
        query, key, value = (heads_first(x) for x in (query_TND, key_TMD, value_TMD))
        mask = None
        if window is not None:
            ones = torch.ones(length, length, dtype=torch.bool, device=query.device)
            mask = ones.tril().triu(1 - window)
        out = scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=True
        )
        return out.transpose(1, 2).flatten(0, 1)

    return attend
